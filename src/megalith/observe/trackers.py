"""Dashboards that a run's numbers go to besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

All of them write into the run's folder and open no connection:

tensorboard  RUN/tensorboard  tensorboard --logdir RUN
wandb        RUN/wandb        wandb sync RUN/wandb/offline-run-*
mlflow       RUN/mlflow.db    mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db

They are side products: one that fails is given up with a warning, and the run goes on.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megalith import optional

__all__ = ["TRACKERS", "Trackers", "packages"]

log = logging.getLogger(__name__)

_TENSORBOARD = "torch.utils.tensorboard"
_LONGEST_PARAMETER, _MOST_PARAMETERS = 500, 100  # characters of a setting's value in MLflow, settings in one call


class _Tracker(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The dashboards ``names`` of one run, on one rank; None: TensorBoard where it is installed.

    Args:
        resumed_step: steps after it replace what an earlier attempt has drawn, where the dashboard can do that.
        settings: of the run, for those that show them.
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
        """The numbers of ``record``, those of nested fields as ``time/forward-backward``, and its samples of text."""
        scalars = dict(_scalars(record))
        for name, tracker in list(self._open.items()):
            with self._side_product(name):
                tracker.log(record["step"], scalars)
                if texts := record.get("samples"):
                    tracker.log_texts(record["step"], texts)

    def close(self) -> None:
        """Writes what is left to write."""
        for name, tracker in list(self._open.items()):
            with self._side_product(name):
                tracker.close()

    @contextmanager
    def _side_product(self, name: str) -> Iterator[None]:
        """An error inside costs the dashboard ``name``, and not the run."""
        try:
            yield
        except Exception as error:  # whatever a package raises
            self._open.pop(name, None)
            log.warning("%s gets no more of this run, which goes on: %s: %s", name, type(error).__name__, error)


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
            # Markdown takes indented lines as they stand
            self._writer.add_text(f"samples/{number}", "\n".join("    " + line for line in lines), step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Each start of a run is an offline run of its own, and all of them a group."""

    def __init__(self, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        wandb = optional.need("wandb")
        (run_folder / "wandb").mkdir(parents=True, exist_ok=True)
        name = run_folder.resolve().name
        self._table = wandb.Table
        self._run = wandb.init(
            mode="offline",
            dir=str(run_folder),
            project="megalith",
            group=name,
            name=f"{name} from step {resumed_step}" if resumed_step else name,
            config=dict(settings),
            # metrics are all that it is for: no capture of the screen, no code, no signals
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False
            ),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def log_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        rows = [[sample["prompt"], sample["text"]] for sample in texts]
        self._run.log({"samples": self._table(columns=["prompt", "text"], data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """Through a client of its own: MLflow's process-wide settings are the user's."""

    def __init__(self, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        self._mlflow = optional.need("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=f"sqlite:///{(run_folder / 'mlflow.db').resolve()}")
        if (experiment := self._client.get_experiment_by_name("megalith")) is None:
            artifacts = (run_folder / "mlartifacts").resolve().as_uri()  # by default in the current folder
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


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of ``record`` but its step."""
    for name, value in _flat(record, "/"):
        if isinstance(value, (int, float)) and name != "step":
            yield name, value


def _flat(tree: Mapping[str, Any], between: str = ".", inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, between, f"{inside}{name}{between}")
        else:
            yield inside + name, value
