"""Converts Hugging Face models to runs, runs to Hugging Face models, and dense models to mixtures of experts."""

from megalith.training.tasks.conversion.export_model import Exported, export_model
from megalith.training.tasks.conversion.import_model import Imported, import_model
from megalith.training.tasks.conversion.logit_proof import LogitProof, prove
from megalith.training.tasks.conversion.upcycle_model import Upcycled, upcycle_model

__all__ = [
    "Exported",
    "Imported",
    "LogitProof",
    "Upcycled",
    "export_model",
    "import_model",
    "prove",
    "upcycle_model",
]
