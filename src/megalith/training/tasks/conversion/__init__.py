"""Models of Hugging Face made into runs of ours, and runs into models of Hugging Face."""

from megalith.training.tasks.conversion.export_model import Exported, export_model
from megalith.training.tasks.conversion.import_model import Imported, import_model
from megalith.training.tasks.conversion.logit_proof import LogitProof, prove

__all__ = ["Exported", "Imported", "LogitProof", "export_model", "import_model", "prove"]
