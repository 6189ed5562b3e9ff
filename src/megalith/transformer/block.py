"""A stack of transformer layers and its final norm."""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention import KVCache
from megalith.transformer.build_options import BuildOptions
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.normalization import Normalization
from megalith.transformer.rotary import RotaryTable

__all__ = ["TransformerBlock"]


class TransformerBlock(nn.Module):
    """``config.num_layers`` layers, then a norm."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config, options, index) for index in range(config.num_layers))
        self.norm = Normalization(config, options)

    def run_layers(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
        caches: list[KVCache] | None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], of [S/tp, B, H] each under sequence parallelism; one of ``caches`` for each layer."""
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, packed_seq_params, dropout_key, None if caches is None else caches[index])
        y: Tensor = self.norm(x)
        return y
