"""Rules on the stages of a pipeline."""

from collections.abc import Iterator

from megalith.config.batch_size_schedule import parse_batch_size_schedule
from megalith.config.draft import Draft, Unknown, Violation, divisors, nearest_first, round_up
from megalith.errors import ConfigError

__all__ = [
    "interleaved_micro_batches_fill_the_pipeline",
    "pipeline_settings_need_a_pipeline",
    "schedule_fits_the_stages",
    "split_backwards_split_every_product",
    "stage_layers_are_those_of_the_model",
    "stages_have_layers",
]

_PIPELINE, _VIRTUAL, _SCHEDULE = "parallel.pipeline", "parallel.virtual", "parallel.schedule"
_LISTED, _LAYERS, _DECODER = "parallel.stage_layers", "model.num_layers", "model.t5.num_decoder_layers"
_COMPILE, _FUSED_LOSS, _FP8 = "train.compile", "train.fused_linear_cross_entropy", "precision.fp8.recipe"
_BATCH, _MICRO, _BATCHES = "train.global_batch_size", "train.micro_batch_size", "train.batch_size_schedule"

# schedules by the stages on each rank
_OF_ONE_STAGE, _OF_TWO_STAGES = ("1f1b", "gpipe", "zero_bubble"), ("interleaved", "zb_v")
_SPLITTING = ("zero_bubble", "zb_v")


def pipeline_settings_need_a_pipeline(run: Draft) -> Iterator[Violation]:
    """virtual, schedule and stage_layers need pipeline above 1."""
    if run[_PIPELINE] > 1:
        return
    # the values of a run without a pipeline, which its config.yaml also contains
    without = {_VIRTUAL: 1, _SCHEDULE: "1f1b", _LISTED: None}
    for name, value in without.items():
        if name in run.given and run.get(name) != value:
            message = f"{name} ({run.get(name)}) has no effect with {_PIPELINE}=1"
            yield Violation("pipeline_settings_need_a_pipeline", name, message, ({name: None},))


def schedule_fits_the_stages(run: Draft) -> Iterator[Violation]:
    """schedule matches the virtual stages per rank: interleaved takes 2 or more, zb_v takes 2, the others take 1."""
    virtual, schedule = run[_VIRTUAL], run[_SCHEDULE]
    fitting = _OF_ONE_STAGE if virtual == 1 else _OF_TWO_STAGES if virtual == 2 else ("interleaved",)
    if run[_PIPELINE] == 1 or schedule in fitting:
        return
    message = f"{_SCHEDULE} ({schedule}) must be {' or '.join(fitting)} with {_VIRTUAL}={virtual}"
    fixes = ({_VIRTUAL: 2}, {_SCHEDULE: None}) if schedule in _OF_TWO_STAGES else ({_SCHEDULE: None},)
    yield Violation("schedule_fits_the_stages", _SCHEDULE, message, fixes)


def split_backwards_split_every_product(run: Draft) -> Iterator[Violation]:
    """zero_bubble and zb_v need compile=false, fused_linear_cross_entropy=false and no fp8."""
    schedule = run[_SCHEDULE]
    if run[_PIPELINE] == 1 or schedule not in _SPLITTING:
        return
    together = ((_COMPILE, "a compiled layer"), (_FUSED_LOSS, "the fused loss"), (_FP8, "an FP8 linear layer"))
    for setting, what in together:
        if value := run.get(setting):
            given = f"{setting}={'true' if value is True else value}"
            message = (
                f"{given} cannot be combined with {_SCHEDULE}={schedule}: {what} computes the gradients of its weights "
                "together with those of its inputs"
            )
            fixes = ({_SCHEDULE: None}, {_VIRTUAL: None, _SCHEDULE: None})
            yield Violation("split_backwards_split_every_product", _SCHEDULE, message, fixes)


def stages_have_layers(run: Draft) -> Iterator[Violation]:
    """The model has at least as many layers, over all stacks, as stages: pipeline x virtual."""
    pipeline, virtual, layers = run[_PIPELINE], run[_VIRTUAL], _num_layers(run)
    if pipeline == 1 or pipeline * virtual <= layers:
        return
    message = f"{_layers_in_words(run)} ({layers}) must be at least {_PIPELINE} ({pipeline}) x {_VIRTUAL} ({virtual})"
    fixes = [{_VIRTUAL: fewer, _SCHEDULE: None} for fewer in (layers // pipeline,) if fewer]
    world = run.world_size
    fewer_ranks = [size for size in divisors(world or pipeline) if size <= layers]
    fixes += [
        {_PIPELINE: size, _VIRTUAL: None, _SCHEDULE: None, _LISTED: None}
        for size in nearest_first(fewer_ranks, pipeline)
    ]
    yield Violation("stages_have_layers", _LAYERS, message, (*fixes, {_LAYERS: pipeline * virtual}))


def stage_layers_are_those_of_the_model(run: Draft) -> Iterator[Violation]:
    """stage_layers has one entry per stage, and they add up to num_layers, plus the layers of a decoder."""
    listed = run.get(_LISTED)
    pipeline, virtual, layers = run[_PIPELINE], run[_VIRTUAL], _num_layers(run)
    if listed is None or pipeline == 1 or (len(listed) == pipeline * virtual and sum(listed) == layers):
        return
    message = (
        f"{_LISTED} ({', '.join(map(str, listed))}) must have {pipeline * virtual} entries, one per stage, that add up "
        f"to {_layers_in_words(run)} ({layers})"
    )
    yield Violation("stage_layers_are_those_of_the_model", _LISTED, message, ({_LISTED: None},))


def interleaved_micro_batches_fill_the_pipeline(run: Draft) -> Iterator[Violation]:
    """With schedule=interleaved, the number of micro-batches per rank and step is a multiple of pipeline."""
    pipeline, micro = run[_PIPELINE], run[_MICRO]
    if pipeline == 1 or run[_SCHEDULE] != "interleaved":
        return
    unit = micro * run.layout.data_parallel
    batches = run.get(_BATCHES)
    try:
        sizes = [stage.global_batch_size for stage in parse_batch_size_schedule(batches)] if batches else [run[_BATCH]]
    except ConfigError:
        raise Unknown(_BATCHES) from None
    wrong = [size // unit for size in sizes if size % unit == 0 and size // unit % pipeline]
    if not wrong:
        return
    message = (
        f"with {_SCHEDULE}=interleaved, the number of micro-batches per step ({wrong[0]}) must be a multiple of "
        f"{_PIPELINE} ({pipeline})"
    )
    larger = () if batches else ({_BATCH: round_up(sizes[0], unit * pipeline)},)
    not_interleaved = {_VIRTUAL: None, _SCHEDULE: None, _LISTED: None}
    yield Violation("interleaved_micro_batches_fill_the_pipeline", _SCHEDULE, message, (*larger, not_interleaved))


def _num_layers(run: Draft) -> int:
    """Returns the number of layers over all stacks of the model."""
    layers: int = run[_LAYERS] + (run.get(_DECODER) or 0)
    return layers


def _layers_in_words(run: Draft) -> str:
    return _LAYERS if run.get(_DECODER) is None else f"{_LAYERS} + {_DECODER}"
