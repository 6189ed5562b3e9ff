"""The JSON Schema matches what the loader accepts."""

from megalith.config import RunConfig, json_schema
from megalith.config.settings_tree import GROUPS

NULL = {"type": "null"}


def test_the_schema_has_every_field_and_no_other():
    schema = json_schema()
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
    for group in GROUPS.values():
        assert schema["$defs"][group.__name__]["properties"].keys() == group.model_fields.keys()


def test_what_may_be_left_out_may_be_null():
    groups = json_schema()["$defs"]
    assert groups["OptimConfig"]["required"] == ["lr"]
    assert groups["OptimConfig"]["properties"]["lr"]["exclusiveMinimum"] == 0
    assert groups["OptimConfig"]["properties"]["min_lr"]["anyOf"] == [{"minimum": 0, "type": "number"}, NULL]
    assert groups["DataConfig"]["properties"]["train"]["anyOf"][-1] == NULL
    assert groups["TransformerConfig"]["properties"]["kv_channels"]["anyOf"] == [
        {"maximum": 2**31 - 1, "minimum": 1, "type": "integer"},
        NULL,
    ]
    assert groups["TransformerConfig"]["required"] == []  # the preset may provide them
    assert groups["TransformerConfig"]["properties"]["rope"]["anyOf"] == [{"$ref": "#/$defs/RopeConfig"}, NULL]
    assert groups["RopeConfig"]["properties"]["base"]["anyOf"][-1] == NULL
    assert sorted(groups["TrainConfig"]["required"]) == ["micro_batch_size", "steps"]
    assert json_schema()["required"] == ["model", "data", "train", "optim"]


def test_choices_and_descriptions_are_in_the_schema():
    optim = json_schema()["$defs"]["OptimConfig"]["properties"]
    assert optim["schedule"]["anyOf"][0]["enum"] == ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    assert optim["schedule"]["default"] == "cosine"
    assert optim["warmup_steps"]["description"].startswith("[steps]")
