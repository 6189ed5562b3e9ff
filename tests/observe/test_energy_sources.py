"""Energy counters, with NVML and powercap files replaced by fakes that have their units and failures."""

import contextlib
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megalith.errors import ConfigError
from megalith.observe import energy_sources
from megalith.observe.energy_sources import PowerSamples, energy_source, why_no_energy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
UUID = "12345678-9abc-def0-1234-56789abcdef0"


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818  NVML's name
    pass


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818
    pass


@pytest.fixture
def nvml(monkeypatch) -> SimpleNamespace:
    """NVML with one GPU, which has used 5 J and draws 70 W."""
    fake = SimpleNamespace(millijoules=5000, milliwatts=70_000, opened=[])

    def read(name: str) -> int:
        value = getattr(fake, name)
        if isinstance(value, Exception):
            raise value
        return value

    def open_by_uuid(uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError("Not Found")
        return "handle"

    module = ModuleType("pynvml")
    module.NVMLError, module.NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    module.NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    module.nvmlInit = lambda: fake.opened.append("NVML")
    module.nvmlDeviceGetHandleByUUID = open_by_uuid
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: read("millijoules")
    module.nvmlDeviceGetPowerUsage = lambda handle: read("milliwatts")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.version, "hip", None)
    return fake


def test_the_package_has_the_functions_and_errors_that_are_used():
    import pynvml

    for error in (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        assert issubclass(error, pynvml.NVMLError)
    names = ("Init", "DeviceGetHandleByUUID", "DeviceGetTotalEnergyConsumption", "DeviceGetPowerUsage")
    assert all(callable(getattr(pynvml, f"nvml{name}")) for name in names)


def test_a_gpu_is_found_by_its_uuid_and_its_counter_is_in_millijoules(nvml):
    source = energy_source(GPU)
    assert (source.name, source.joules(), nvml.opened) == (f"GPU-{UUID}", 5.0, ["NVML"])
    nvml.millijoules = 7250
    assert source.joules() == 7.25


def test_a_reading_that_fails_is_none(nvml):
    source = energy_source(GPU)
    nvml.millijoules = NVMLError("GPU is lost")
    assert source.joules() is None


@pytest.mark.parametrize("error", [NVMLError_NotSupported("Not Supported"), NVMLError_FunctionNotFound("Not Found")])
def test_a_gpu_without_a_counter_has_its_power_integrated(nvml, error):
    nvml.millijoules = error
    source = energy_source(GPU)
    assert isinstance(source, PowerSamples)
    before, started = source.joules(), time.perf_counter()
    time.sleep(0.35)
    after, seconds = source.joules(), time.perf_counter() - started
    source.close()
    assert after - before == pytest.approx(70.0 * seconds, rel=0.1)


def test_sampled_power_is_the_mean_of_two_samples_times_the_time_between(monkeypatch):
    times, watts = iter([0.0, 2.0, 5.0, 6.0, 7.0]), iter([100.0, 200.0, NVMLError("lost"), 300.0])
    monkeypatch.setattr(energy_sources.threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(energy_sources.time, "perf_counter", lambda: next(times))

    def power() -> float:
        value = next(watts)
        if isinstance(value, Exception):
            raise value
        return value

    source = PowerSamples("GPU", power, NVMLError)
    assert source.joules() == 2.0 * 150.0
    assert source.joules() is None
    assert source.joules() == 2.0 * 150.0 + 4.0 * 250.0  # from 2 s to 6 s


@pytest.mark.parametrize("error", [NVMLError_NotSupported("Not Supported"), NVMLError("Insufficient Permissions")])
def test_a_gpu_whose_energy_cannot_be_read_is_refused(nvml, error):
    nvml.millijoules = nvml.milliwatts = error
    with pytest.raises(ConfigError, match=rf"cannot read the energy of GPU-{UUID} \({error}\)"):
        energy_source(GPU)


def test_a_gpu_that_nvml_does_not_know_is_refused(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="other"))
    with pytest.raises(ConfigError, match="cannot read the energy of GPU-other"):
        energy_source(GPU)


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"pip install 'megalith\[energy\]'$"):
        energy_source(GPU)


def test_amd_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert why_no_energy(GPU) == "the energy of AMD GPUs cannot be measured"


def zone(folder: Path, name: str, microjoules: int, counter_range: int = 1_000_000) -> Path:
    folder.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", counter_range)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


@pytest.fixture
def powercap(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(energy_sources, "_POWERCAP", tmp_path)
    return tmp_path


def test_the_packages_of_a_machine_are_summed_without_their_parts_and_wrap_around(powercap):
    first = zone(powercap / "intel-rapl:0", "package-0", 900_000)
    second = zone(powercap / "intel-rapl:1", "package-1", 100_000)
    parts = [zone(powercap / "intel-rapl:0:0", "core", 0), zone(powercap / "intel-rapl:2", "psys", 0)]
    source = energy_source(CPU)
    assert source.joules() == 0.0
    for part in parts:
        part.write_text("777777\n")
    first.write_text("200000\n")  # beyond its range of 1 J
    second.write_text("150000\n")
    assert source.joules() == pytest.approx(0.3 + 0.05)
    assert source.joules() == pytest.approx(0.3 + 0.05)
    second.unlink()
    assert source.joules() is None
    source.close()


def test_counters_of_cpus_are_read_in_between_so_that_none_wraps_around_unseen(powercap, monkeypatch):
    monkeypatch.setattr(energy_sources, "_RAPL_EVERY", 0.01)
    file = zone(powercap / "intel-rapl:0", "package-0", 0)
    source = energy_source(CPU)
    for microjoules in (600_000, 200_000, 800_000, 400_000):  # beyond its range of 1 J twice
        file.write_text(f"{microjoules}\n")
        while source._last != [microjoules]:
            time.sleep(0.001)
    assert source.joules() == pytest.approx(2.4)
    source.close()


def test_the_cpus_of_a_machine_have_the_name_of_its_boot(powercap, monkeypatch):
    zone(powercap / "intel-rapl:0", "package-0", 0)
    boot = powercap / "boot_id"
    boot.write_text("1a2b\n")
    monkeypatch.setattr(energy_sources, "_BOOT_ID", boot)
    with contextlib.closing(energy_source(CPU)) as source:
        assert source.name == "CPU packages of 1a2b"


def test_one_package_that_cannot_be_read_is_not_left_out(powercap):
    zone(powercap / "intel-rapl:0", "package-0", 0)
    zone(powercap / "intel-rapl:1", "package-1", 0).unlink()
    with pytest.raises(ConfigError, match=r"the CPU's energy counter cannot be read \(.*No such file"):
        energy_source(CPU)


def test_a_counter_that_only_root_may_read_is_refused_with_the_command_that_opens_it(powercap, monkeypatch):
    file = zone(powercap / "intel-rapl:0", "package-0", 0)
    read_text = Path.read_text

    def refused(path: Path) -> str:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ConfigError, match=r"only root may read .*: sudo chmod a\+r .*intel-rapl:\*/energy_uj$"):
        energy_source(CPU)


def test_a_machine_without_a_counter_is_refused(powercap):
    with pytest.raises(ConfigError, match="no energy counter of this machine's CPU is visible"):
        energy_source(CPU)
