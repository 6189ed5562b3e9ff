"""BERT pretraining: masked tokens, and whether two segments are in order.

Devlin et al. 2019 (arXiv:1810.04805), with the sentence order of Lan et al. 2019 (arXiv:1909.11942).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.config import MaskingConfig, RunConfig
from megalith.data.bert_dataset import BertBatch, BertDataset, BertSample, stack_bert_samples
from megalith.data.blended_dataset import blended
from megalith.data.samples import Samples
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.models.bert_model import BertOutput
from megalith.training.tasks.bert_task import BertInputs, BertTask
from megalith.training.tasks.masked_task import HELD_OUT_SEED
from megalith.training.tasks.shown_text import bracketed

__all__ = ["PretrainBert"]


class PretrainBert(BertTask[BertSample]):
    """BERT pretraining: the term ``mlm`` is the mean negative log-likelihood in nats of the masked tokens.

    With ``bert.binary_head``, the term ``sop`` is that of the order of a row's two segments, over the rows. Evaluation
    also measures the accuracy of both: ``mlm_accuracy``, ``sop_accuracy``.

    Raises:
        ConfigError: see ``BertTask``.
    """

    in_brackets = "tokens to predict"
    counted = "masked tokens"

    def __init__(self, config: RunConfig) -> None:
        self.masking = config.data.masking or MaskingConfig()
        super().__init__(config, predicted=self.masking.probability)
        self.terms = MappingProxyType({"mlm": 1.0, "sop": 1.0} if self.bert.binary_head else {"mlm": 1.0})

    def train_dataset(self) -> Samples[BertSample]:
        """Returns ``data.train`` in the order of ``train.seed``."""
        return blended(self.config.data, partial(self._dataset, seed=self.config.train.seed))

    def evaluation_dataset(self, prefix: str) -> HeldOutSamples[BertSample]:
        """Returns the samples of one epoch of ``prefix``, with fixed masks."""
        return HeldOutSamples(self._dataset(prefix, HELD_OUT_SEED))

    def stack(self, samples: Sequence[BertSample], rows: Sequence[int]) -> BertBatch:
        """Stacks the samples, one per row."""
        return stack_bert_samples(samples, rows)

    def counts(self, batch: BertBatch) -> Mapping[str, int]:
        """Returns the number of masked tokens, and of rows whose order counts."""
        masked, rows = int((batch.labels >= 0).sum()), int((batch.classes >= 0).sum())
        of_tokens = {"mlm": masked, "mlm_accuracy": masked}
        return {**of_tokens, "sop": rows, "sop_accuracy": rows} if "sop" in self.terms else of_tokens

    def sums(self, output: BertOutput, inputs: BertInputs) -> Mapping[str, Tensor]:
        """Sums the losses of masked tokens and of rows; in evaluation also the numbers of correct predictions."""
        found = {"mlm": output.predictions.sum()}
        if output.binary_logits is not None:
            wide = output.binary_logits.to(torch.promote_types(output.binary_logits.dtype, torch.float32))
            found["sop"] = cross_entropy(wide, inputs.classes, reduction="sum")
        if output.hits is None:
            return found
        found["mlm_accuracy"] = output.hits.sum().float()
        if output.binary_logits is not None:
            found["sop_accuracy"] = (output.binary_logits.argmax(-1) == inputs.classes).sum().float()
        return found

    def sample_as_text(self, sample: BertSample) -> list[str]:
        """Decodes the text, with the tokens to predict in brackets."""
        N = sample.num_tokens
        return bracketed(sample.labels[:N].tolist(), sample.loss_mask[:N].tolist(), self.tokenizer)

    def _dataset(self, prefix: str, seed: int) -> BertDataset:
        return BertDataset(
            prefix,
            self.tokenizer,
            self.config.data.seq_length,
            seed,
            self.masking,
            sentence_order=self.bert.binary_head,
            vocab_size=self.config.model.vocab_size,
        )
