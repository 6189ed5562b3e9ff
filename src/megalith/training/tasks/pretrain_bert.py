"""What a BERT is pretrained on: masked tokens, and whether two segments are in their order.

Devlin et al. 2019 (arXiv:1810.04805), with the sentence order of Lan et al. 2019 (arXiv:1909.11942).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.config import MaskingConfig, RunConfig
from megalith.data.bert_dataset import BertBatch, BertDataset, BertSample, stack_bert_samples
from megalith.data.masked_dataset import HeldOutSamples
from megalith.models.bert_model import BertOutput
from megalith.training.tasks.bert_task import BertInputs, BertTask
from megalith.training.tasks.shown_text import bracketed

__all__ = ["PretrainBert"]

_HELD_OUT_SEED = 0  # of lengths and masks, whatever the run's seed is: losses of all runs can be compared


class PretrainBert(BertTask[BertSample]):
    """The term ``mlm`` is the negative log-likelihood of a masked token in nats, over the masked tokens.

    With ``bert.binary_head`` the term ``sop`` is that of the order of a row's two segments, over the rows. Evaluation
    measures the accuracy of both too: ``mlm_accuracy``, ``sop_accuracy``.

    Raises:
        ConfigError: as ``BertTask``.
    """

    in_brackets = "what is to be predicted"
    counted = "masked tokens"

    def __init__(self, config: RunConfig) -> None:
        self.masking = config.data.masking or MaskingConfig()
        super().__init__(config, predicted=self.masking.probability)
        self.terms = MappingProxyType({"mlm": 1.0, "sop": 1.0} if self.bert.binary_head else {"mlm": 1.0})

    def train_dataset(self) -> BertDataset:
        """``data.train``, in the order of ``train.seed``."""
        assert self.config.data.train is not None, "preflight refuses a run without data"
        return self._dataset(self.config.data.train, self.config.train.seed)

    def evaluation_dataset(self, prefix: str) -> HeldOutSamples[BertSample]:
        """The samples of an epoch of ``prefix``, each masked in one way."""
        return HeldOutSamples(self._dataset(prefix, _HELD_OUT_SEED))

    def stack(self, samples: Sequence[BertSample], rows: Sequence[int]) -> BertBatch:
        """The samples, one a row."""
        return stack_bert_samples(samples, rows)

    def counts(self, batch: BertBatch) -> Mapping[str, int]:
        """The masked tokens, and the rows whose order counts."""
        masked, rows = int((batch.labels >= 0).sum()), int((batch.classes >= 0).sum())
        of_tokens = {"mlm": masked, "mlm_accuracy": masked}
        return {**of_tokens, "sop": rows, "sop_accuracy": rows} if "sop" in self.terms else of_tokens

    def sums(self, output: BertOutput, inputs: BertInputs) -> Mapping[str, Tensor]:
        """The losses of masked tokens and of rows; in evaluation too how many are predicted right."""
        found = {"mlm": output.predictions.sum()}
        if output.hits is not None:
            found["mlm_accuracy"] = output.hits.sum().float()
        if output.binary_logits is not None:
            wide = output.binary_logits.to(torch.promote_types(output.binary_logits.dtype, torch.float32))
            found["sop"] = cross_entropy(wide, inputs.classes, reduction="sum")
            found["sop_accuracy"] = (output.binary_logits.argmax(-1) == inputs.classes).sum().float()
        return found

    def sample_as_text(self, sample: BertSample) -> list[str]:
        """Its text decoded, with what is to be predicted in brackets."""
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
