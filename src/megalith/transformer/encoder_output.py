"""What a decoder reads from an encoder: its output, and which part of it each decoder token sees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.device_copy import to_device
from megalith.errors import ShapeError
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["EncoderOutput", "PairedDocuments"]


@dataclass(frozen=True, eq=False)
class PairedDocuments:
    """The documents in the rows of an encoder and a decoder, and which of them belong together.

    Attributes:
        encoder, decoder: documents of whole rows, even if ranks of cp hold parts of them.
        bounds: int64 [B, Sd, 2], for each decoder token the half-open range of encoder tokens that it sees; its ends
            are equal if it sees none.
    """

    encoder: PackedSeqParams
    decoder: PackedSeqParams
    bounds: Tensor

    @classmethod
    def from_padding(cls, encoder_is_token: Tensor, decoder_is_token: Tensor) -> "PairedDocuments":
        """Creates them from padded rows, given bool masks [B, Se] and [B, Sd] that are True for tokens.

        If a row has no tokens on one side, nothing is seen in that row. Raises ShapeError like
        ``PackedSeqParams.from_padding``, and if the numbers of rows differ.
        """
        encoder, decoder = (PackedSeqParams.from_padding(each) for each in (encoder_is_token, decoder_is_token))
        _check_rows(encoder, decoder)
        first = encoder_is_token.long().argmax(dim=1)  # [B]
        of_row = torch.stack((first, first + encoder_is_token.sum(dim=1)), dim=-1)  # [B, 2]
        bounds = torch.where(decoder_is_token.unsqueeze(-1), of_row.unsqueeze(1), 0)
        return cls(encoder, decoder, bounds)

    @classmethod
    def from_packed(cls, encoder: PackedSeqParams, decoder: PackedSeqParams) -> "PairedDocuments":
        """Creates them from packed rows: the n-th documents of a row belong together.

        If one row has more documents than the other (padding at its end), the excess sees nothing and is not seen.
        Raises ShapeError if the numbers of rows differ.
        """
        _check_rows(encoder, decoder)
        longest = max(map(len, decoder.rows()))
        of_document = torch.tensor(
            [[*row[:longest], *[(0, 0)] * (longest - len(row))] for row in encoder.rows()]
        )  # [B, documents, 2]
        ids = decoder.document_ids().cpu()  # [B, Sd]
        bounds = of_document.gather(1, ids.unsqueeze(-1).expand(-1, -1, 2))
        return cls(encoder, decoder, bounds.to(decoder.document_bounds.device))

    def to(self, device: torch.device | str) -> "PairedDocuments":
        """Returns the same documents on ``device``."""
        return PairedDocuments(self.encoder.to(device), self.decoder.to(device), to_device(self.bounds, device))

    def seen(self, positions: Tensor) -> Tensor:
        """Returns bool [B, 1, Sq, Se]: which encoder tokens the decoder tokens at ``positions``, int64 [Sq], see."""
        keys = torch.arange(self.encoder.seq_length, device=self.bounds.device)
        first, end = self.bounds[:, positions].unsqueeze(1).unsqueeze(-2).unbind(-1)  # [B, 1, Sq, 1]
        return (keys >= first) & (keys < end)


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """The input of cross attention in every layer of a decoder.

    Attributes:
        hidden: [Se/cp, B, H], or [Se/cp/tp, B, H] under sequence parallelism; split zig-zag under cp.
        seen: bool [B, 1, Sd/cp, Se], which tokens of the encoder's whole rows each decoder token sees; None: all.
    """

    hidden: Tensor
    seen: Tensor | None = None


def _check_rows(encoder: PackedSeqParams, decoder: PackedSeqParams) -> None:
    if encoder.batch_size != decoder.batch_size:
        raise ShapeError(
            f"encoder and decoder must have the same number of rows; got {encoder.batch_size} and {decoder.batch_size}"
        )
