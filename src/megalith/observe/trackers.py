"""Dashboards that receive a run's metrics in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

All of them write into the run's folder and open no connection:

tensorboard  RUN/tensorboard  tensorboard --logdir RUN
wandb        RUN/wandb        wandb sync RUN/wandb/offline-run-*
mlflow       RUN/mlflow.db    mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db

They are optional: if one fails, it is disabled with a warning, and the run continues.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from megalith import optional

__all__ = ["TRACKERS", "Trackers", "packages"]

log = logging.getLogger(__name__)

_TENSORBOARD = "torch.utils.tensorboard"
_LONGEST_PARAMETER, _MOST_PARAMETERS = 500, 100  # characters of a setting's value in MLflow, settings in one call


class _Tracker(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class _DrawsHistograms(Protocol):
    """Trackers that support histograms: all but MLflow."""

    def log_histograms(self, step: int, histograms: Mapping[str, Sequence[float]]) -> None:
        """Logs histograms by name: how much is in bins 0, 1, ... of width 1, not always a whole number."""


class Trackers:
    """The dashboards ``names`` of one run, on one rank; None: TensorBoard if it is installed.

    Args:
        resumed_step: later steps replace those of an earlier attempt, if the dashboard supports that.
        settings: settings of the run, for dashboards that show them.
    """

    def __init__(
        self, run_folder: Path, names: Sequence[str] | None, *, resumed_step: int, settings: Mapping[str, Any]
    ) -> None:
        if names is None:
            names = ["tensorboard"] if optional.has(_TENSORBOARD) else []
        self._open: dict[str, _Tracker] = {}
        for name in names:
            with self._side_product(name):
                self._open[name] = TRACKERS[name](run_folder, resumed_step, settings)

    def write(self, record: Mapping[str, Any]) -> None:
        """Logs the numbers and text samples of ``record``; nested numbers have names like ``time/forward-backward``.

        Layers with experts are nested by index, ``experts/layer-3/max_violation``. ``experts/layer-3/load`` is a
        histogram of the chosen experts, if the dashboard supports histograms.
        """
        named = dict(_flat(_by_layer(record), "/"))
        scalars, histograms = dict(_scalars(named)), dict(_histograms(named))
        for name, tracker in list(self._open.items()):
            with self._side_product(name):
                tracker.log(record["step"], scalars)
                if histograms and isinstance(tracker, _DrawsHistograms):
                    tracker.log_histograms(record["step"], histograms)
                if texts := record.get("samples"):
                    tracker.log_texts(record["step"], texts)

    def close(self) -> None:
        """Flushes and closes the dashboards."""
        for name, tracker in list(self._open.items()):
            with self._side_product(name):
                tracker.close()

    @contextmanager
    def _side_product(self, name: str) -> Iterator[None]:
        """Disables the dashboard ``name`` after an error inside, so that the run continues."""
        try:
            yield
        except Exception as error:  # the packages may raise anything
            self._open.pop(name, None)
            log.warning(
                "%s is disabled for the rest of this run, which continues: %s: %s", name, type(error).__name__, error
            )


def packages(names: Sequence[str] | None) -> Iterator[str]:
    """The modules that the dashboards ``names`` need, for ``optional.need``."""
    for name in names or ():
        yield {"tensorboard": _TENSORBOARD}.get(name, name)


class _TensorBoard:
    def __init__(self, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        writer = optional.need(_TENSORBOARD).SummaryWriter
        self._writer = writer(str(run_folder / "tensorboard"), purge_step=resumed_step + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        for number, sample in enumerate(texts):
            lines = (sample["prompt"] + sample["text"]).splitlines()
            # Markdown shows indented lines verbatim
            self._writer.add_text(f"samples/{number}", "\n".join("    " + line for line in lines), step)

    def log_histograms(self, step: int, histograms: Mapping[str, Sequence[float]]) -> None:
        for name, counts in histograms.items():
            self._writer.add_histogram_raw(
                name,
                min=0.0,
                max=float(len(counts)),
                num=sum(counts),
                sum=sum((number + 0.5) * count for number, count in enumerate(counts)),
                sum_squares=sum((number + 0.5) ** 2 * count for number, count in enumerate(counts)),
                bucket_limits=[number + 1.0 for number in range(len(counts))],
                bucket_counts=list(counts),
                global_step=step,
            )

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Each start or resume of a run is a separate offline run; all of them form a group."""

    def __init__(self, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        wandb = optional.need("wandb")
        (run_folder / "wandb").mkdir(parents=True, exist_ok=True)
        name = run_folder.resolve().name
        self._table, self._histogram = wandb.Table, wandb.Histogram
        self._run = wandb.init(
            mode="offline",
            dir=str(run_folder),
            project="megalith",
            group=name,
            name=f"{name} from step {resumed_step}" if resumed_step else name,
            config=dict(settings),
            # metrics only: no console capture, no code, no system statistics
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False
            ),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        rows = [[sample["prompt"], sample["text"]] for sample in texts]
        self._run.log({"samples": self._table(columns=["prompt", "text"], data=rows)}, step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Sequence[float]]) -> None:
        drawn = {
            name: self._histogram(np_histogram=(list(counts), list(range(len(counts) + 1))))
            for name, counts in histograms.items()
        }
        self._run.log(drawn, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """Uses a separate client, because MLflow's process-wide settings belong to the user."""

    def __init__(self, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        self._mlflow = optional.need("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=f"sqlite:///{(run_folder / 'mlflow.db').resolve()}")
        if (experiment := self._client.get_experiment_by_name("megalith")) is None:
            artifacts = (run_folder / "mlartifacts").resolve().as_uri()  # the default is the current folder
            experiment_id = self._client.create_experiment("megalith", artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        name = run_folder.resolve().name
        self._run_id = self._client.create_run(
            experiment_id, run_name=f"{name} from step {resumed_step}" if resumed_step else name
        ).info.run_id
        parameter = self._mlflow.entities.Param
        parameters = [parameter(key, str(value)[:_LONGEST_PARAMETER]) for key, value in _flat(settings)]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + _MOST_PARAMETERS])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        metric, now = self._mlflow.entities.Metric, int(1000 * time.time())
        metrics = [metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        text = "\n\n".join(sample["prompt"] + sample["text"] for sample in texts)
        self._client.log_text(self._run_id, text, f"samples/step-{step:08d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS: Mapping[str, Callable[[Path, int, Mapping[str, Any]], _Tracker]] = MappingProxyType(
    {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases, "mlflow": _MLflow}
)


def _scalars(named: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record by their full names, except its step."""
    for name, value in named.items():
        if isinstance(value, (int, float)) and name != "step":
            yield name, value


def _histograms(named: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[float]]]:
    """The expert loads of each layer in a record, by their full names."""
    for name, value in named.items():
        if name.startswith("experts/") and name.endswith("/load"):
            yield name, value


def _by_layer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """``record`` with the list of MoE layers converted to a mapping by layer index."""
    if "experts" not in record:
        return record
    experts = {name: value for name, value in record["experts"].items() if name != "layers"}
    layers = {
        f"layer-{layer['layer']}": {name: value for name, value in layer.items() if name != "layer"}
        for layer in record["experts"]["layers"]
    }
    return {**record, "experts": {**experts, **layers}}


def _flat(tree: Mapping[str, Any], between: str = ".", inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, between, f"{inside}{name}{between}")
        else:
            yield inside + name, value
