"""How process groups are made: backend, timeout and NCCL's own options, each given explicitly for an axis."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megalith.errors import TopologyError

__all__ = ["GroupOptions", "NCCLOptions"]


@dataclass(frozen=True, kw_only=True)
class NCCLOptions:
    """What NCCL is told when a communicator is made; None leaves the choice to NCCL.

    Attributes:
        cga_cluster_size: thread blocks in a cluster, 0 to 8.
        min_ctas, max_ctas: bounds of the thread blocks that a collective uses, at least 1.
        net_name: the network: "IB" or "Socket".
        high_priority_stream: collectives run on a stream of high priority.

    Raises:
        TopologyError: a number out of range, or bounds the wrong way round.
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

    def for_torch(self) -> object:
        """``ProcessGroupNCCL.Options`` that say the same."""
        settings = asdict(self)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.pop("high_priority_stream"))
        for name, value in settings.items():
            if value is not None:
                setattr(options.config, name, value)
        return options


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How a process group is made.

    Attributes:
        backend: as for ``torch.distributed.new_group``: "nccl", "gloo", "cpu:gloo,cuda:nccl"; None: as the default
            group.
        timeout: of its collectives; None: that of all groups.
        nccl: for groups of NCCL only.

    Raises:
        TopologyError: a backend that this torch does not have, a timeout that is not positive, NCCL's options for
            another backend.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: NCCLOptions | None = None

    def __post_init__(self) -> None:
        backends = [] if self.backend is None else [part.rpartition(":")[2] for part in self.backend.split(",")]
        for backend in backends:
            if not dist.is_backend_available(backend):
                raise TopologyError(
                    f"backend must be one that this torch has, or several as in 'cpu:gloo,cuda:nccl'; got {backend!r}"
                )
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise TopologyError(f"timeout must be positive; got {self.timeout.total_seconds()} s")
        if self.nccl is not None and not self._is_nccl():
            raise TopologyError(
                f"nccl options need the backend nccl, and this group's is {self.backend or _default_backend()}; "
                "leave them out, or give backend='nccl'"
            )

    def _is_nccl(self) -> bool:
        return "nccl" in (self.backend or _default_backend())


def _default_backend() -> str:
    return dist.get_backend() if dist.is_initialized() else "none, before init_process_group"
