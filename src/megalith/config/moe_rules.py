"""Rules on mixtures of experts and on the ranks that share them."""

from collections.abc import Iterator
from fractions import Fraction
from math import prod

from megalith.config.draft import Draft, Fix, Violation, divisors, nearest_first, round_up
from megalith.config.layer_pattern import holds
from megalith.config.router_config import groups_limit_choices

__all__ = [
    "balanced_choices_need_no_other_balance",
    "capacities_drop_something",
    "capacity_is_for_choices_by_score",
    "choices_leave_some_expert_out",
    "expert_groups_hold_the_chosen",
    "expert_groups_limit_choices",
    "expert_layouts_need_experts",
    "expert_ranks_divide_the_world",
    "experts_are_in_some_layer",
    "experts_divide_among_ranks",
    "experts_need_sequence_parallel",
    "fused_exchanges_are_in_bfloat16",
    "fused_exchanges_are_over_whole_experts",
    "loads_can_be_uneven",
    "offsets_follow_the_next_best_expert",
    "one_expert_needs_a_weight",
    "padded_capacities_travel_by_row",
    "rows_are_bounded_below_the_most",
    "sinkhorn_has_weights_of_its_own",
    "symmetric_exchanges_are_of_few_experts",
    "tokens_choose_among_the_experts",
    "tokens_travel_by_some_way",
]

_EXPERTS, _TOP_K, _CAPACITY = "model.moe.num_experts", "model.moe.top_k", "model.moe.capacity.factor"
_ROUTER, _PAD = "model.moe.router", "model.moe.capacity.pad"
_SCORE, _PRE, _SELECTION = f"{_ROUTER}.score_function", f"{_ROUTER}.pre_softmax", f"{_ROUTER}.selection"
_GROUPS, _GROUP_TOPK, _GROUP_SCORE = (f"{_ROUTER}.{name}" for name in ("num_groups", "group_topk", "group_score_topk"))
_DROP = "model.moe.capacity.drop"
_METHOD, _MAX_ROWS = "parallel.dispatch.method", "parallel.dispatch.max_rows"
_OF_KERNELS = 16  # 512 threads per block in groups of 32, one group per rank or expert
_LAYERS = "model.moe.layers"
_EXPERT, _EXPERT_TENSOR = "parallel.expert", "parallel.expert_tensor"
_TENSOR, _SEQUENCE, _PIPELINE = "parallel.tensor", "parallel.sequence", "parallel.pipeline"
# other settings that balance the load or act on scores; off if 0 or None
_BIAS_RATE = f"{_ROUTER}.expert_bias_update_rate"
_BALANCE = tuple(
    f"{_ROUTER}.{name}"
    for name in ("expert_bias_update_rate", "sequence_balance", "micro_batch_balance", "global_balance", "num_groups")
)


def tokens_choose_among_the_experts(run: Draft) -> Iterator[Violation]:
    """top_k is at most num_experts."""
    top_k, experts = run[_TOP_K], run[_EXPERTS]
    if top_k > experts:
        message = f"{_TOP_K} ({top_k}) must be at most {_EXPERTS} ({experts})"
        yield Violation("tokens_choose_among_the_experts", _TOP_K, message, ({_TOP_K: experts}, {_EXPERTS: top_k}))


def one_expert_needs_a_weight(run: Draft) -> Iterator[Violation]:
    """top_k=1 with softmax needs pre_softmax: softmax over a single expert is always 1 and has no gradient."""
    if run[_TOP_K] == 1 and run[_SCORE] == "softmax" and not run[_PRE] and run[_SELECTION] != "sinkhorn":
        message = (
            f"{_TOP_K}=1 with {_SCORE}=softmax needs {_PRE}=true: softmax over a single expert is always 1 and has no "
            "gradient"
        )
        yield Violation("one_expert_needs_a_weight", _PRE, message, ({_PRE: True}, {_TOP_K: 2}))


def expert_groups_hold_the_chosen(run: Draft) -> Iterator[Violation]:
    """num_groups divides num_experts, and the selected groups hold at least top_k experts.

    group_score_topk is at most the number of experts per group; without it, group_topk divides top_k.
    """
    groups, kept, experts, top_k = run.get(_GROUPS), run.get(_GROUP_TOPK), run[_EXPERTS], run[_TOP_K]
    scored = run.get(_GROUP_SCORE)
    if groups is None and kept is None:
        return
    if groups is not None and kept is not None and experts % groups == 0:
        per_group = experts // groups
        scored_fit = top_k % kept == 0 if scored is None else scored <= per_group
        if kept <= groups and scored_fit and top_k <= kept * per_group:
            return
    wanted = (
        f"{_GROUPS} ({groups}) and {_GROUP_TOPK} ({kept}) must both be set, with {_GROUP_TOPK} at most {_GROUPS}; "
        f"{_GROUPS} must divide {_EXPERTS} ({experts}); the selected groups must hold at least {_TOP_K} ({top_k}) "
        f"experts; {_GROUP_SCORE} ({scored}) must be at most the number of experts per group, and without it "
        f"{_GROUP_TOPK} must divide {_TOP_K}"
    )
    fixes: list[Fix] = [
        {_GROUPS: number, _GROUP_TOPK: chosen, _GROUP_SCORE: None}
        for number in nearest_first(divisors(experts), groups or 1)
        for chosen in nearest_first(divisors(top_k), kept or 1)
        if top_k // chosen <= experts // number and groups_limit_choices(top_k, number, chosen)
    ]
    yield Violation(
        "expert_groups_hold_the_chosen",
        _GROUPS,
        wanted,
        (*fixes[:8], dict.fromkeys((_GROUPS, _GROUP_TOPK, _GROUP_SCORE))),
    )


def expert_groups_limit_choices(run: Draft) -> Iterator[Violation]:
    """group_topk is below num_groups, and below top_k if groups are ranked by their best expert only."""
    groups, kept, top_k, scored = run[_GROUPS], run[_GROUP_TOPK], run[_TOP_K], run.get(_GROUP_SCORE)
    if run[_SELECTION] != "top_k" or kept > groups or (scored is None and top_k % kept):
        return  # reported by other rules
    if groups_limit_choices(top_k, groups, kept, scored):
        return
    why = f"groups are ranked by their best expert only, and the best {top_k} experts are in the best {top_k} groups"
    if kept == groups:
        why = f"a token may choose from all {groups} groups"
    message = f"{_GROUPS} ({groups}) has no effect with {_GROUP_TOPK} ({kept}) and {_TOP_K} ({top_k}): {why}"
    fixes: list[Fix] = [dict.fromkeys((_GROUPS, _GROUP_TOPK, _GROUP_SCORE))]
    fixes += [{_GROUP_TOPK: fewer} for fewer in nearest_first(range(1, min(kept, groups)), kept)][:4]
    yield Violation("expert_groups_limit_choices", _GROUPS, message, tuple(fixes))


def balanced_choices_need_no_other_balance(run: Draft) -> Iterator[Violation]:
    """selection other than top_k balances the load by itself and takes no balance losses, expert bias or groups."""
    if run[_SELECTION] == "top_k":
        return
    # an update rate of 0 keeps a constant bias, which top_k selection would apply
    also = [name for name in _BALANCE if run.get(name) or (name == _BIAS_RATE and run.get(name) is not None)]
    if also:
        message = f"{_SELECTION}={run[_SELECTION]} balances the load by itself; remove {' and '.join(also)}"
        fixes: tuple[Fix, ...] = (dict.fromkeys(also), {_SELECTION: None})
        if _GROUPS in also:
            fixes = (dict.fromkeys((*also, _GROUP_TOPK, _GROUP_SCORE)), {_SELECTION: None})
        yield Violation("balanced_choices_need_no_other_balance", _SELECTION, message, fixes)


def capacity_is_for_choices_by_score(run: Draft) -> Iterator[Violation]:
    """capacity needs selection=top_k: the other selections are balanced and hardly overflow any expert."""
    if run.get(_CAPACITY) is not None and run[_SELECTION] != "top_k":
        message = f"model.moe.capacity needs {_SELECTION}=top_k; got {run[_SELECTION]}"
        fixes = ({_SELECTION: None}, {_CAPACITY: None, _DROP: None, _PAD: None})
        yield Violation("capacity_is_for_choices_by_score", _SELECTION, message, fixes)


def sinkhorn_has_weights_of_its_own(run: Draft) -> Iterator[Violation]:
    """selection=sinkhorn takes no score_function: weights are sigmoid for top_k=1, else softmax over all experts."""
    if run[_SELECTION] == "sinkhorn" and (run[_SCORE] != "softmax" or run[_PRE]):
        message = (
            f"{_SELECTION}=sinkhorn computes its own weights, by sigmoid if {_TOP_K}=1 and otherwise by softmax over "
            f"all experts; remove {_SCORE} and {_PRE}"
        )
        fixes: tuple[Fix, ...] = ({_SCORE: None, _PRE: None}, {_SELECTION: None})
        yield Violation("sinkhorn_has_weights_of_its_own", _SELECTION, message, fixes)


def offsets_follow_the_next_best_expert(run: Draft) -> Iterator[Violation]:
    """selection=quantile needs top_k below num_experts, so that every token leaves at least one expert unselected."""
    top_k, experts = run[_TOP_K], run[_EXPERTS]
    if run[_SELECTION] == "quantile" and top_k == experts:
        message = f"{_SELECTION}=quantile needs {_TOP_K} ({top_k}) to be less than {_EXPERTS} ({experts})"
        fixes: tuple[Fix, ...] = ({_SELECTION: None}, {_EXPERTS: experts + 1})
        yield Violation("offsets_follow_the_next_best_expert", _TOP_K, message, fixes)


def choices_leave_some_expert_out(run: Draft) -> Iterator[Violation]:
    """selection=round_robin, and sinkhorn with top_k > 1, need top_k below num_experts: otherwise all are selected."""
    top_k, experts, selection = run[_TOP_K], run[_EXPERTS], run[_SELECTION]
    # for top_k=1 Sinkhorn weights by sigmoid, which top_k selection with softmax does not
    if top_k == experts and (selection == "round_robin" or (selection == "sinkhorn" and top_k > 1)):
        message = (
            f"{_SELECTION}={selection} has no effect with {_TOP_K} ({top_k}) equal to {_EXPERTS}: every token goes to "
            "every expert, with the weights that selection=top_k gives"
        )
        fixes: tuple[Fix, ...] = ({_SELECTION: None}, {_EXPERTS: experts + 1})
        yield Violation("choices_leave_some_expert_out", _SELECTION, message, fixes)


def padded_capacities_travel_by_row(run: Draft) -> Iterator[Violation]:
    """capacity.pad needs dispatch.method=all_to_all and no dispatch.max_rows: it already bounds the rows."""
    if not run.get(_PAD):
        return
    method, bound = _METHOD, _MAX_ROWS
    if run[method] != "all_to_all":
        message = f"{_PAD}=true needs {method}=all_to_all; got {run[method]}"
        yield Violation("padded_capacities_travel_by_row", method, message, ({method: None}, {_PAD: None}))
    if run.get(bound) is not None:
        message = f"{bound} ({run[bound]}) has no effect with {_PAD}=true, which bounds the rows of every expert"
        yield Violation("padded_capacities_travel_by_row", bound, message, ({bound: None}, {_PAD: None}))


def rows_are_bounded_below_the_most(run: Draft) -> Iterator[Violation]:
    """dispatch.max_rows is below the worst imbalance of a rank: the smaller of expert and num_experts / top_k."""
    bound, experts, top_k, ranks = run.get(_MAX_ROWS), run[_EXPERTS], run[_TOP_K], run[_EXPERT]
    if bound is None or run.get(_PAD):  # reported by padded_capacities_travel_by_row
        return
    # a rank holds at most all K experts of a token, and at most as many as it has experts
    most = min(Fraction(ranks), Fraction(experts, top_k))
    if Fraction(str(bound)) >= most:
        message = (
            f"{_MAX_ROWS} ({bound}) has no effect: with {_EXPERT}={ranks} and {_TOP_K}={top_k} of {experts} experts, a "
            f"rank receives at most {float(most):.4g} times the rows of a balanced load; it must be below that"
        )
        yield Violation("rows_are_bounded_below_the_most", _MAX_ROWS, message, ({_MAX_ROWS: None},))


def tokens_travel_by_some_way(run: Draft) -> Iterator[Violation]:
    """dispatch.method other than all_to_all needs expert or expert_tensor above 1: otherwise no tokens are sent."""
    if run.get(_EXPERTS) is None or run[_METHOD] == "all_to_all":
        return
    if run[_EXPERT] == 1 and (run.get(_EXPERT_TENSOR) or run[_TENSOR]) == 1:
        message = f"{_METHOD}={run[_METHOD]} has no effect with {_EXPERT}=1 and one rank per expert"
        yield Violation("tokens_travel_by_some_way", _METHOD, message, ({_METHOD: None},))


def capacities_drop_something(run: Draft) -> Iterator[Violation]:
    """capacity.factor is below num_experts / top_k, else nothing is dropped: then pad is set, and drop is not."""
    factor, experts, top_k = run.get(_CAPACITY), run[_EXPERTS], run[_TOP_K]
    if factor is None or Fraction(str(factor)) < Fraction(experts, top_k):
        return
    room = f"at {_EXPERTS} / {_TOP_K} = {experts / top_k:.4g} or more, an expert has room for every token"
    if not run.get(_PAD):
        message = f"{_CAPACITY} ({factor}) drops nothing: {room}; it must be smaller, or {_PAD}=true"
        fixes: tuple[Fix, ...] = ({_CAPACITY: None, _DROP: None, _PAD: None},)
        yield Violation("capacities_drop_something", _CAPACITY, message, fixes)
    elif _DROP in run.given:
        message = f"{_DROP}={run[_DROP]} has no effect with {_CAPACITY} ({factor}), which drops nothing: {room}"
        yield Violation("capacities_drop_something", _DROP, message, ({_DROP: None},))


def loads_can_be_uneven(run: Draft) -> Iterator[Violation]:
    """Load-balancing losses and expert_bias_update_rate need top_k below num_experts: otherwise load is balanced."""
    top_k, experts = run[_TOP_K], run[_EXPERTS]
    given = [name for name in _BALANCE if name.endswith("_balance") and run.get(name)]
    if run.get(_BIAS_RATE) is not None and run[_SELECTION] == "top_k":
        given.append(_BIAS_RATE)
    if top_k == experts and given:
        message = (
            f"{' and '.join(given)} {'has' if len(given) == 1 else 'have'} no effect with {_TOP_K} ({top_k}) equal to "
            f"{_EXPERTS}: every token goes to every expert, so the load is balanced"
        )
        yield Violation("loads_can_be_uneven", given[0], message, (dict.fromkeys(given),))


def experts_are_in_some_layer(run: Draft) -> Iterator[Violation]:
    """moe.layers puts experts in at least one layer, counting those of model.mtp."""
    pattern = run.get(_LAYERS)
    if run.get(_EXPERTS) is None or pattern is None:
        return
    num_layers = run["model.num_layers"] + (run.get("model.mtp.num_modules") or 0)
    if not any(holds(pattern, layer) for layer in range(num_layers)):
        message = f"{_LAYERS} puts experts in none of the {num_layers} layers, so model.moe has no effect"
        yield Violation("experts_are_in_some_layer", _LAYERS, message, ({_LAYERS: None},))


def experts_divide_among_ranks(run: Draft) -> Iterator[Violation]:
    """num_experts is divisible by expert, and the ffn_hidden_size of an expert by expert_tensor."""
    degree, experts = run[_EXPERT], run[_EXPERTS]
    if experts % degree:
        message = f"{_EXPERTS} ({experts}) must be divisible by {_EXPERT} ({degree})"
        fixes = [{_EXPERT: fewer} for fewer in nearest_first(divisors(experts), degree)]
        fixes.append({_EXPERTS: round_up(experts, degree)})
        yield Violation("experts_divide_among_ranks", _EXPERTS, message, tuple(fixes))
    name = "model.moe.ffn_hidden_size"
    width = run.get(name) or run["model.ffn_hidden_size"]
    ranks = run.get(_EXPERT_TENSOR) or run[_TENSOR]
    if width % ranks:
        message = f"the ffn_hidden_size of an expert ({width}) must be divisible by the {ranks} ranks that share it"
        fixes = [{name: round_up(width, ranks)}, {_EXPERT_TENSOR: 1}]
        yield Violation("experts_divide_among_ranks", name, message, tuple(fixes))


def fused_exchanges_are_in_bfloat16(run: Draft) -> Iterator[Violation]:
    """dispatch.method=flex needs precision.dtype=bfloat16, the only dtype in which DeepEP combines."""
    dtype = "precision.dtype"
    if run[_METHOD] == "flex" and run[dtype] != "bfloat16":
        message = f"{_METHOD}=flex needs {dtype}=bfloat16, the only dtype in which DeepEP combines; got {run[dtype]}"
        yield Violation("fused_exchanges_are_in_bfloat16", dtype, message, ({dtype: "bfloat16"}, {_METHOD: None}))


def fused_exchanges_are_over_whole_experts(run: Draft) -> Iterator[Violation]:
    """dispatch.method=flex and symmetric need expert_tensor=1: they combine whole experts, not shards of one."""
    ranks, method = run.get(_EXPERT_TENSOR) or run[_TENSOR], run[_METHOD]
    if method in ("flex", "symmetric") and ranks > 1:
        message = f"{_METHOD}={method} needs {_EXPERT_TENSOR}=1; got {ranks} ranks that share each expert"
        fixes = ({_EXPERT_TENSOR: 1}, {_METHOD: None})
        yield Violation("fused_exchanges_are_over_whole_experts", _EXPERT_TENSOR, message, fixes)


def symmetric_exchanges_are_of_few_experts(run: Draft) -> Iterator[Violation]:
    """dispatch.method=symmetric supports at most 16 ranks of expert with 16 experts each, as torch's kernels do."""
    ranks, experts = run[_EXPERT], run[_EXPERTS]
    if run[_METHOD] != "symmetric" or experts % ranks or max(ranks, experts // ranks) <= _OF_KERNELS:
        return
    message = (
        f"{_METHOD}=symmetric supports at most {_OF_KERNELS} ranks of {_EXPERT} with {_OF_KERNELS} experts each, the "
        f"limit of torch's kernels; got {ranks} ranks with {experts // ranks} experts each"
    )
    fits = [n for n in divisors(experts) if max(n, experts // n) <= _OF_KERNELS]
    fixes: list[Fix] = [{_EXPERT: degree} for degree in nearest_first(fits, ranks)]
    yield Violation("symmetric_exchanges_are_of_few_experts", _EXPERT, message, (*fixes, {_METHOD: None}))


def expert_layouts_need_experts(run: Draft) -> Iterator[Violation]:
    """expert, expert_tensor and dispatch need model.moe."""
    if run.get(_EXPERTS) is not None:
        return
    without_effect = {_EXPERT: 1, _EXPERT_TENSOR: None, _METHOD: "all_to_all", _MAX_ROWS: None}
    for name, default in without_effect.items():
        if run.get(name) != default:
            message = f"{name} ({run.get(name)}) has no effect without model.moe"
            yield Violation("expert_layouts_need_experts", name, message, ({name: None}, {_EXPERTS: 8}))


def experts_need_sequence_parallel(run: Draft) -> Iterator[Violation]:
    """Experts with tensor above 1 need sequence=true: otherwise all ranks of tensor would route the same tokens."""
    if run.get(_EXPERTS) is not None and run[_TENSOR] > 1 and not run[_SEQUENCE]:
        message = (
            f"a mixture of experts with {_TENSOR}={run[_TENSOR]} needs {_SEQUENCE}=true, so that each rank routes its "
            "own tokens"
        )
        yield Violation("experts_need_sequence_parallel", _SEQUENCE, message, ({_SEQUENCE: True}, {_TENSOR: 1}))


def expert_ranks_divide_the_world(run: Draft) -> Iterator[Violation]:
    """expert x expert_tensor divides the ranks of a pipeline stage."""
    if run.get(_EXPERTS) is None or run.world_size is None or run.world_size % run[_PIPELINE]:
        return
    ranks = run.world_size // run[_PIPELINE]
    degrees = {_EXPERT: run[_EXPERT], _EXPERT_TENSOR: run.get(_EXPERT_TENSOR) or run[_TENSOR]}
    if ranks % prod(degrees.values()) == 0:
        return
    product = " x ".join(f"{name} ({degree})" for name, degree in degrees.items())
    fixes: list[Fix] = []
    for width in (degrees[_EXPERT_TENSOR], 1):
        for degree in nearest_first(divisors(ranks), run[_EXPERT]):
            if ranks % (degree * width) == 0 and run[_EXPERTS] % degree == 0:
                fixes.append({_EXPERT: degree, _EXPERT_TENSOR: width})
    message = f"{product} must divide the number of ranks of a pipeline stage ({ranks})"
    yield Violation("expert_ranks_divide_the_world", _EXPERT, message, tuple(fixes))
