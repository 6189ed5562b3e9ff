"""Options for creating process groups: backend, timeout and NCCL options, set explicitly per axis."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megalith.errors import TopologyError

__all__ = ["GroupOptions", "NCCLOptions", "default_backend"]


@dataclass(frozen=True, kw_only=True)
class NCCLOptions:
    """Options of an NCCL communicator; None leaves the choice to NCCL.

    Attributes:
        cga_cluster_size: thread blocks in a cluster, 0 to 8.
        min_ctas, max_ctas: bounds on the thread blocks that a collective uses, at least 1.
        net_name: the network: "IB" or "Socket".
        high_priority_stream: run collectives on a high-priority stream.

    Raises:
        TopologyError: a number is out of range, or min_ctas exceeds max_ctas.
    """

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: Literal["IB", "Socket"] | None = None
    high_priority_stream: bool = False

    def __post_init__(self) -> None:
        ctas = [count for count in (self.min_ctas, self.max_ctas) if count is not None]
        if not 0 <= (self.cga_cluster_size or 0) <= 8 or any(count < 1 for count in ctas) or ctas != sorted(ctas):
            raise TopologyError(
                "cga_cluster_size must be in [0, 8] and 1 <= min_ctas <= max_ctas; got "
                f"cga_cluster_size={self.cga_cluster_size}, min_ctas={self.min_ctas}, max_ctas={self.max_ctas}"
            )
        if self.net_name not in (None, "IB", "Socket"):
            raise TopologyError(f"net_name must be 'IB' or 'Socket'; got {self.net_name!r}")

    def for_torch(self, timeout: timedelta | None) -> object:
        """Returns the equivalent ``ProcessGroupNCCL.Options`` for a group with ``timeout``; None: torch's default."""
        settings = asdict(self)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.pop("high_priority_stream"))
        for name, value in settings.items():
            if value is not None:
                setattr(options.config, name, value)
        if timeout is not None:
            options._timeout = timeout  # torch warns where the options of a group have another
        return options


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of a process group.

    Attributes:
        backend: as for ``torch.distributed.new_group``: "nccl", "gloo", "cpu:gloo,cuda:nccl"; None: the default
            group's.
        timeout: of its collectives; None: that of all groups.
        nccl: only for groups with the NCCL backend.

    Raises:
        TopologyError: the backend is not available in this torch, the timeout is not positive, or NCCL options are
            given for another backend.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: NCCLOptions | None = None

    def __post_init__(self) -> None:
        backends = [] if self.backend is None else [part.rpartition(":")[2] for part in self.backend.split(",")]
        for backend in backends:
            if not dist.is_backend_available(backend):
                raise TopologyError(
                    "backend must be available in this build of torch, or a list such as 'cpu:gloo,cuda:nccl'; "
                    f"got {backend!r}"
                )
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise TopologyError(f"timeout must be positive; got {self.timeout.total_seconds()} s")
        backend = self.backend or default_backend()
        if self.nccl is not None and "nccl" not in backend:
            raise TopologyError(
                f"nccl options need the nccl backend; this group's backend is {backend}; leave them out, or set "
                "backend='nccl'"
            )


def default_backend() -> str:
    """Returns the backends of the default group by device, such as "cpu:gloo,cuda:nccl"."""
    # of a group without an explicit backend, get_backend() only knows that it is undefined
    return dist.get_backend_config() if dist.is_initialized() else "none, before init_process_group"
