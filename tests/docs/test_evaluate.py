"""docs/evaluate.md: its Python block runs with a stand-in for lm-eval; test_commands runs its commands."""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from megalith.data.choices import read_questions
from megalith.training.tasks.text_scores import TextScorer
from tests.docs.pages import page, python_blocks
from tests.training.tasks.scorers import scorer
from tests.training.tasks.test_harness import LM, TASK


def test_the_block_evaluates_a_task(monkeypatch, capsys):
    def simple_evaluate(model: Any, tasks: list[str], task_manager: Any) -> dict[str, Any]:
        assert isinstance(model, LM)
        assert task_manager.include_path == "my_tasks"
        found = model.loglikelihood([SimpleNamespace(args=("Once", " upon"))])
        return {"results": dict.fromkeys(tasks, found)}

    names = {"simple_evaluate": simple_evaluate, "TaskManager": SimpleNamespace, "LM": LM}
    for module in ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model"):
        stand_in: Any = ModuleType(module)
        stand_in.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(TextScorer, "load", lambda _: scorer())
    [source] = python_blocks("evaluate.md")
    exec(compile(source, "docs/evaluate.md", "exec"), {})
    assert re.fullmatch(r"\[\(-\d+\.\d+, (True|False)\)\]\n", capsys.readouterr().out)


def test_the_task_and_the_question_on_the_page_are_those_that_tests_read(tmp_path):
    [task] = re.findall(r"^```yaml\n(.*?)^```", page("evaluate.md"), re.M | re.S)
    assert task == TASK.read_text()
    [question] = re.findall(r"^```json\n(.*?)^```", page("evaluate.md"), re.M | re.S)
    (tmp_path / "q.jsonl").write_text(question)
    assert read_questions(tmp_path / "q.jsonl")[0].choices[0] == " blue"
