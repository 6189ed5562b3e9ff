"""The parts of a report page, each as HTML, or "" if the run has no data for it. All text is escaped."""

import math
import shlex
from html import escape
from itertools import pairwise
from statistics import median

from megalith.insight.report_curves import loss_curves, small_curves
from megalith.insight.report_experts import expert_loads
from megalith.insight.report_measures import held_out_measures
from megalith.insight.report_parts import card, is_finite, num_steps
from megalith.insight.report_time import phases, time_of_the_run
from megalith.insight.run_history import RunHistory
from megalith.observe.metrics import COMPILE
from megalith.observe.units import duration, energy, gibibytes, perplexity, quantity

__all__ = ["origin", "sections", "summary", "tiles", "title"]

# facts that are used above, and not repeated below
_IN_THE_HEAD = ("parameters", "recipe", "model", "started", "command", "loss_over")


def title(run: RunHistory) -> str:
    """The names of the run and its recipe, as the page title."""
    recipe = run.about.get("recipe")
    return escape(f"{run.name} · {recipe}" if recipe and recipe != run.name else run.name)


def origin(run: RunHistory) -> str:
    """What was trained, when, and the command to repeat it."""
    facts = [f"{name} {run.about[name]}" for name in ("recipe", "model") if run.about.get(name)]
    if isinstance(parameters := run.about.get("parameters"), int):
        facts.append(f"{parameters:,} parameters")
    facts += [str(run.about["started"])] if run.about.get("started") else []
    command = run.about.get("command")
    if command is None and run.settings:
        command = f"megalith train {shlex.quote(str(run.folder / 'config.yaml'))}"
    line = f'<p class="origin">{escape(" · ".join(facts))}</p>' if facts else ""
    return line + (f'<pre class="command">{escape(str(command))}</pre>' if command else "")


def summary(run: RunHistory) -> str:
    """The run in a few sentences."""
    parameters = run.about.get("parameters")
    subject = f"{quantity(parameters)} parameters" if isinstance(parameters, int) else "A model"
    tokens = run.last("tokens")
    amount = f"{quantity(tokens)} tokens" if tokens else num_steps(run.training[-1]["step"])
    time = f" in {duration(run.seconds)}" if math.isfinite(run.seconds) else ""
    if compiling := run.time.get(COMPILE):
        time += f", {duration(compiling)} of it waiting for the compiler"
    sentences = [f"{subject} trained on {amount}{time}."]
    if run.valid_loss is not None:
        bigram = run.evaluation.get("bigram_loss")
        sentences.append(f"Held-out loss: {run.valid_loss:.3f} {run.loss_unit}{_distance(run.valid_loss, bigram)}.")
    if len(run.phases) > 3:
        sentences.append(f"The layout changed {len(run.phases) - 1} times.")
    else:
        sentences += [
            f"The layout changed from {before.layout} to {after.layout} after step {before.last_step:,}."
            for before, after in pairwise(run.phases)
        ]
    nonfinite = sum(not math.isfinite(loss) for loss in run.column("loss")[1])
    if nonfinite:
        sentences.append(f"The loss was not finite in {nonfinite} of {len(run.training)} records.")
    return escape(" ".join(sentences))


def tiles(run: RunHistory) -> str:
    """The headline numbers."""
    step = run.training[-1]["step"]
    loss, tokens, mfu = run.last("loss"), run.last("tokens"), run.last("mfu")
    speeds = [value for value in run.column("tokens_per_second")[1] if math.isfinite(value)]
    shown = []
    if run.valid_loss is not None:
        shown.append(("Held-out loss", f"{run.valid_loss:.3f}", _perplexity(run, run.valid_loss)))
    if loss is not None:
        shown.append(("Training loss", f"{loss:.3f}", "at the last step"))
    if tokens is not None:
        shown.append(("Tokens", quantity(tokens), f"in {num_steps(step)}"))
    if speeds:
        note = "median" if mfu is None else f"median; {mfu:.1%} MFU at the last step"
        shown.append(("Tokens per second", quantity(median(speeds)), note))
    if math.isfinite(run.seconds):
        shown.append(("Time", duration(run.seconds), f"median step {duration(run.step_seconds)}"))
    if (peak := run.last("peak_memory")) is not None:
        shown.append(("Peak memory", gibibytes(peak), "on rank 0"))
    if run.joules:
        shown.append(("Energy", energy(run.joules), "of the training steps, as far as counters were read"))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>"
        for name, value, note in shown
    )


def sections(run: RunHistory) -> str:
    """Everything below the headline numbers."""
    return "".join(
        [loss_curves(run), _valid_sets(run), _baselines(run), held_out_measures(run), small_curves(run),
         expert_loads(run), _datasets(run), time_of_the_run(run), phases(run), _samples(run), _about(run),
         _settings(run)]
    )  # fmt: skip


def _valid_sets(run: RunHistory) -> str:
    """The last and the lowest loss of each named validation set."""
    rows = []
    for name, losses in run.valid_sets.items():
        last = losses[-1][1]
        lowest, step = min(((loss, step) for step, loss in losses if math.isfinite(loss)), default=(math.nan, 0))
        best = f"lowest {lowest:.3f} at step {step:,}" if step else ""
        rows.append((name, f"{last:.3f}", _perplexity(run, last), best))
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return card("Validation sets", f"held-out loss, {run.loss_unit}", f"<table>{table}</table>") if rows else ""


def _datasets(run: RunHistory) -> str:
    """How much of each blended dataset the run has read."""
    total = sum(samples for samples, _ in run.datasets.values())
    rows = [
        (name, f"{quantity(samples)} samples", f"{samples / total:.1%}" if total else "", f"{epochs:.3g} epochs")
        for name, (samples, epochs) in run.datasets.items()
    ]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return card("Training data", "read up to the last step", f"<table>{table}</table>") if rows else ""


def _baselines(run: RunHistory) -> str:
    fields = (("Unigram", "unigram_loss"), ("Interpolated bigram", "bigram_loss"))
    losses = [(name, float(run.evaluation[key]), "") for name, key in fields if is_finite(run.evaluation.get(key))]
    if not losses or run.valid_loss is None or not math.isfinite(run.valid_loss):
        return ""
    losses.append(("This model", run.valid_loss, " ours"))
    longest = max(loss for _, loss, _ in losses)
    rows = "".join(
        f'<div class="row{kind}"><span>{name}</span><i style="width: {100 * loss / longest:.1f}%"></i>'
        f"<b>{loss:.3f}</b></div>"
        for name, loss, kind in losses
    )
    return card("N-gram baselines", "held-out loss, nats per token; lower is better", f'<div class="bars">{rows}</div>')


def _samples(run: RunHistory) -> str:
    texts = "".join(
        f"<pre><mark>{escape(str(sample.get('prompt', '')))}</mark>{escape(str(sample.get('text', '')))}</pre>"
        for sample in run.samples
    )
    return card("Samples", "prompts are highlighted", f'<div class="samples">{texts}</div>') if texts else ""


def _about(run: RunHistory) -> str:
    facts = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(fact))}</dd></div>"
        for name, fact in run.about.items()
        if name not in _IN_THE_HEAD
    )
    return card("Machine and versions", "", f'<dl class="facts">{facts}</dl>') if facts else ""


def _settings(run: RunHistory) -> str:
    if not run.settings:
        return ""
    return f'<details class="card"><summary>Resolved settings</summary><pre>{escape(run.settings)}</pre></details>'


def _perplexity(run: RunHistory, loss: float) -> str:
    if math.isnan(loss) or run.loss_over != "tokens":
        return ""
    value = perplexity(loss)
    return f"perplexity {value:,.1f}" if value < 1e6 else f"perplexity {value:.3g}"


def _distance(loss: float, bigram: object) -> str:
    if not (is_finite(bigram) and math.isfinite(loss)):
        return ""
    return f", {abs(bigram - loss):.3f} {'below' if loss < bigram else 'above'} an interpolated bigram"
