"""The JSON Schema of a run's YAML file, which editors use for completion and checks."""

from typing import Any

from megalith.config.run_config import RunConfig

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of a run's YAML file; every field that may be left out may also be null."""
    schema = RunConfig.model_json_schema(mode="validation")
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            nullable = field.get("anyOf", [])
            if name not in part.get("required", ()) and {"type": "null"} not in nullable:
                described = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
                part["properties"][name] = {"anyOf": [field, {"type": "null"}], **described}
    shape = schema["$defs"]["TransformerConfig"]
    shape["required"] = []  # model.preset may provide it
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
