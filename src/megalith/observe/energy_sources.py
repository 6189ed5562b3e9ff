"""Energy counters of devices: NVIDIA GPUs through NVML, CPUs through RAPL in Linux's powercap files.

A GPU is looked up by UUID, because NVML's index ignores ``CUDA_VISIBLE_DEVICES``. A GPU without an energy counter has
its power sampled and integrated instead.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from megalith import optional
from megalith.errors import ConfigError, MissingDependencyError

__all__ = ["EnergySource", "PowerSamples", "energy_source", "why_no_energy"]

_NVML = "pynvml"
_POWERCAP = Path("/sys/class/powercap")
_SAMPLES_PER_SECOND = 10.0  # NVML's reading is an average over the last 1/6 to 1 s


class EnergySource(Protocol):
    """A counter of the energy that one device, or several together, have used.

    ``name`` identifies the counter on its machine, because several ranks may share it.
    """

    name: str

    def joules(self) -> float | None:
        """Returns the counter's reading, which starts anywhere; None if it cannot be read now."""

    def close(self) -> None:
        """Releases the counter."""


def why_no_energy(device: torch.device) -> str | None:
    """Returns why the energy of ``device`` cannot be measured, in a clause; None if nothing is known to prevent it.

    Does not initialize CUDA.
    """
    if device.type == "cpu":
        return None if _packages() else _why_no_rapl()
    if torch.version.hip is not None:
        return "the energy of AMD GPUs cannot be measured"
    try:
        optional.need(_NVML)
    except MissingDependencyError as error:
        return str(error)
    return None


def energy_source(device: torch.device) -> EnergySource:
    """Opens the energy counter of ``device``: of one GPU, or of all CPUs of this machine.

    Raises:
        ConfigError: there is none that can be read; the message says why.
    """
    if (reason := why_no_energy(device)) is not None:
        raise ConfigError(f"{reason}; or set train.log_energy=false")
    return _Rapl() if device.type == "cpu" else _gpu(device)


def _gpu(device: torch.device) -> EnergySource:
    nvml: Any = optional.need(_NVML)
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError_NotSupported:
            nvml.nvmlDeviceGetPowerUsage(handle)
            return PowerSamples(name, lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3, nvml.NVMLError)
    except nvml.NVMLError as error:
        raise ConfigError(f"NVML cannot read the energy of {name} ({error}); set train.log_energy=false") from error
    return _NvmlCounter(name, nvml, handle)


class _NvmlCounter:
    """The energy counter of an NVIDIA GPU, which counts millijoules since the driver was loaded."""

    def __init__(self, name: str, nvml: Any, handle: Any) -> None:
        self.name = name
        self._nvml, self._handle = nvml, handle

    def joules(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        pass  # NVML stays initialized, as torch leaves it too


class PowerSamples:
    """Integrates the power of a device that has no energy counter, sampled in a thread.

    Args:
        watts: returns the power now; after an ``error`` the reading is None until the next sample.
    """

    def __init__(self, name: str, watts: Callable[[], float], error: type[Exception]) -> None:
        self.name = name
        self._watts, self._error = watts, error
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._joules, self._last = 0.0, (time.perf_counter(), watts())
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="power samples", daemon=True)
        self._thread.start()

    def joules(self) -> float | None:
        self._sample()
        return None if self._failed else self._joules

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(1 / _SAMPLES_PER_SECOND):
            self._sample()

    def _sample(self) -> None:
        """Adds the energy since the last sample, with the mean of the power then and now."""
        with self._lock:
            try:
                now, watts = time.perf_counter(), self._watts()
            except self._error:
                self._failed = True
                return
            (before, watts_before), self._last, self._failed = self._last, (now, watts), False
            self._joules += (now - before) * (watts_before + watts) / 2


class _Rapl:
    """The sum over the CPU packages of this machine; their counters wrap around after a few hours at most."""

    name = "CPU packages"

    def __init__(self) -> None:
        self._files = [package / "energy_uj" for package in _packages()]
        self._ranges = [int((package / "max_energy_range_uj").read_text()) for package in _packages()]
        self._last = [int(file.read_text()) for file in self._files]
        self._microjoules = 0

    def joules(self) -> float | None:
        try:
            now = [int(file.read_text()) for file in self._files]
        except OSError:
            return None
        for before, after, counter_range in zip(self._last, now, self._ranges, strict=True):
            self._microjoules += after - before if after >= before else after - before + counter_range
        self._last = now
        return self._microjoules / 1e6

    def close(self) -> None:
        pass


def _packages() -> list[Path]:
    """Returns the folders of the CPU packages whose counters can be read; their parts and "psys" would count twice."""
    return [package for package in _all_packages() if _is_readable(package / "energy_uj")]


def _all_packages() -> list[Path]:
    zones = sorted(_POWERCAP.glob("intel-rapl:*"))  # also on AMD
    return [zone for zone in zones if (zone / "name").is_file() and (zone / "name").read_text().startswith("package")]


def _is_readable(file: Path) -> bool:
    try:
        file.read_text()
    except OSError:
        return False
    return True


def _why_no_rapl() -> str:
    if not _all_packages():
        return f"this machine has no energy counter of its CPU ({_POWERCAP}/intel-rapl:*)"
    return f"only root may read the CPU's energy counter; run: sudo chmod a+r {_POWERCAP}/intel-rapl:*/energy_uj"
