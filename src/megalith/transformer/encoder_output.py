"""What a decoder reads of an encoder: its output, and which part of it each token of the decoder sees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["EncoderOutput", "PairedDocuments"]


@dataclass(frozen=True, eq=False)
class PairedDocuments:
    """The documents of an encoder's rows and of a decoder's, and which of them belong together.

    Attributes:
        encoder, decoder: of whole rows also where ranks of cp hold parts of them.
        bounds: int64 [B, Sd, 2], for each token of the decoder the first of the encoder's row that it sees, and the
            one after the last; equal where it sees none.
    """

    encoder: PackedSeqParams
    decoder: PackedSeqParams
    bounds: Tensor

    @classmethod
    def from_padding(cls, encoder_is_token: Tensor, decoder_is_token: Tensor) -> "PairedDocuments":
        """Of padded rows, from which places hold tokens: bool [B, Se] and [B, Sd].

        A row of one with no tokens gives its partner nothing. Raises ShapeError as ``PackedSeqParams.from_padding``,
        and for other numbers of rows.
        """
        encoder, decoder = (PackedSeqParams.from_padding(each) for each in (encoder_is_token, decoder_is_token))
        _check_rows(encoder, decoder)
        first = encoder_is_token.long().argmax(dim=1)  # [B]
        of_row = torch.stack((first, first + encoder_is_token.sum(dim=1)), dim=-1)  # [B, 2]
        bounds = torch.where(decoder_is_token.unsqueeze(-1), of_row.unsqueeze(1), 0)
        return cls(encoder, decoder, bounds)

    @classmethod
    def from_packed(cls, encoder: PackedSeqParams, decoder: PackedSeqParams) -> "PairedDocuments":
        """Of packed rows, whose documents belong together by their ordinal in a row.

        Those behind the last one of the other row, padding at its end, see nothing and are seen by nothing.
        Raises ShapeError for other numbers of rows.
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
        """The same documents on ``device``."""
        return PairedDocuments(
            self.encoder.to(device), self.decoder.to(device), self.bounds.to(device, non_blocking=True)
        )

    def seen(self, positions: Tensor) -> Tensor:
        """bool [B, 1, Sq, Se]: which tokens of the encoder those of the decoder at ``positions``, int64 [Sq], see."""
        keys = torch.arange(self.encoder.seq_length, device=self.bounds.device)
        first, end = self.bounds[:, positions].unsqueeze(1).unsqueeze(-2).unbind(-1)  # [B, 1, Sq, 1]
        return (keys >= first) & (keys < end)


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """What cross attention reads in every layer of a decoder.

    Attributes:
        hidden: [Se/cp, B, H], [Se/cp/tp, B, H] under sequence parallelism; zigzag under cp.
        seen: bool [B, 1, Sd/cp, Se], which tokens of the encoder's whole rows those of the decoder see; None: all.
    """

    hidden: Tensor
    seen: Tensor | None = None


def _check_rows(encoder: PackedSeqParams, decoder: PackedSeqParams) -> None:
    if encoder.batch_size != decoder.batch_size:
        raise ShapeError(
            f"an encoder and its decoder must have as many rows; got {encoder.batch_size} and {decoder.batch_size}"
        )
