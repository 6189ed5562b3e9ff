"""Energy counters of devices: NVIDIA GPUs through NVML, CPUs through RAPL in Linux's powercap files.

A GPU is looked up by UUID, because NVML's index ignores ``CUDA_VISIBLE_DEVICES``. A GPU without an energy counter has
its power sampled and integrated instead. NVML has no counters of the instances of a GPU that MIG divides.
"""

import socket
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
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
_POWER_EVERY = 0.1  # seconds between samples of a GPU's power
_RAPL_EVERY = 20.0  # seconds; at 400 W, a counter of 65.5 kJ wraps around every 164 s


class EnergySource(Protocol):
    """A counter of the energy that one device, or several together, have used.

    ``name`` identifies the counter among those of all machines, because several ranks may share it.
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
        return _why_no_rapl()
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
        ConfigError: there is none that can be read; the message says why, in a clause.
    """
    if (reason := why_no_energy(device)) is not None:
        raise ConfigError(reason)
    return _Rapl() if device.type == "cpu" else _gpu(device)


def _gpu(device: torch.device) -> EnergySource:
    nvml: Any = optional.need(_NVML)
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            nvml.nvmlDeviceGetPowerUsage(handle)
            return PowerSamples(name, lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3, nvml.NVMLError)
    except nvml.NVMLError as error:
        raise ConfigError(f"NVML cannot read the energy of {name} ({error}), as of a GPU divided by MIG") from error
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


class _Every:
    """Calls ``function`` in a thread every few seconds, until ``close``."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        self._seconds, self._function, self._closing = seconds, function, threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._function()


class PowerSamples:
    """Integrates the power of a device that has no energy counter, sampled in a thread.

    Args:
        watts: returns the power now; a reading during which it raises ``error`` is None, and the next bridges the gap.
    """

    def __init__(self, name: str, watts: Callable[[], float], error: type[Exception]) -> None:
        self.name = name
        self._watts, self._error, self._lock = watts, error, threading.Lock()
        self._joules, self._last = 0.0, (time.perf_counter(), watts())
        self._samples = _Every(_POWER_EVERY, self.joules)

    def joules(self) -> float | None:
        """Adds the energy since the last sample, with the mean of the power then and now."""
        with self._lock:
            try:
                now, watts = time.perf_counter(), self._watts()
            except self._error:
                return None
            (before, watts_before), self._last = self._last, (now, watts)
            self._joules += (now - before) * (watts_before + watts) / 2
            return self._joules

    def close(self) -> None:
        self._samples.close()


class _Rapl:
    """The sum over the CPU packages of this machine, whose counters are read before they wrap around twice."""

    def __init__(self) -> None:
        machine = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else socket.gethostname()
        self.name = f"CPU packages of {machine}"
        self._files = [package / "energy_uj" for package in _packages()]
        self._ranges = [int((package / "max_energy_range_uj").read_text()) for package in _packages()]
        self._last = [int(file.read_text()) for file in self._files]
        self._microjoules, self._lock = 0, threading.Lock()
        self._samples = _Every(_RAPL_EVERY, self.joules)

    def joules(self) -> float | None:
        with self._lock:
            try:
                now = [int(file.read_text()) for file in self._files]
            except OSError:
                return None
            for before, after, counter_range in zip(self._last, now, self._ranges, strict=True):
                self._microjoules += after - before if after >= before else after - before + counter_range
            self._last = now
            return self._microjoules / 1e6

    def close(self) -> None:
        self._samples.close()


def _packages() -> list[Path]:
    """Returns the folders of the CPU packages; their parts and "psys" would count twice."""
    zones = sorted(_POWERCAP.glob("intel-rapl:*"))  # also on AMD
    return [zone for zone in zones if (zone / "name").is_file() and (zone / "name").read_text().startswith("package")]


def _why_no_rapl() -> str | None:
    """Returns why not all CPU packages can be read."""
    packages = _packages()
    if not packages:
        return f"no energy counter of this machine's CPU is visible ({_POWERCAP}/intel-rapl:*), as in most containers"
    for package in packages:
        try:
            (package / "energy_uj").read_text()
        except PermissionError:
            return (
                "only root may read the CPU's energy counter; until the next start of the machine, this changes it: "
                f"sudo chmod a+r {_POWERCAP}/intel-rapl:*/energy_uj"
            )
        except OSError as error:
            return f"the CPU's energy counter cannot be read ({error})"
    return None
