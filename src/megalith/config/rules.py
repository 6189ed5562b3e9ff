"""All rules between fields. A rule is a function of the draft; docs/settings.md shows its docstring's first line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from megalith.config.data_rules import (
    blended_datasets_are_drawn,
    blends_have_no_classes,
    phases_follow_each_other,
    several_datasets_have_names,
    weights_are_of_several_datasets,
    weights_name_every_dataset,
)
from megalith.config.draft import Draft, Unknown, Violation
from megalith.config.fp8_rules import (
    fp8_has_no_loss_scale,
    fp8_leaves_layers,
    fp8_sequences_are_whole_blocks,
    fp8_sizes_are_aligned,
    fp8_splits_no_block,
)
from megalith.config.kind_rules import (
    bert_positions_are_learned,
    classes_are_counted,
    negatives_are_of_queries,
    only_decoders_write,
    queries_have_negatives,
)
from megalith.config.layout_rules import (
    batches_divide_among_ranks,
    context_method_needs_context_parallel,
    degrees_multiply_to_the_world_size,
    heads_divide_among_context_ranks,
    heads_divide_among_tensor_ranks,
    hidden_size_divides_among_shards,
    query_groups_divide_among_tensor_ranks,
    sequence_divides_among_context_ranks,
    sequence_divides_among_tensor_ranks,
    sequence_parallel_needs_tensor_parallel,
    two_levels_divide_context,
)
from megalith.config.model_rules import (
    heads_divide_hidden_size,
    latent_heads_are_those_of_mla,
    local_base_needs_a_window,
    modules_predict_within_the_sequence,
    positions_are_given,
    positions_reach_the_sequence,
    query_groups_divide_heads,
    rotated_features_are_even,
    scaling_counts_rotations_of_a_pair,
    scores_have_one_scale,
    sections_are_all_pairs,
    yarn_has_one_attention_factor,
)
from megalith.config.moe_rules import (
    balanced_choices_need_no_other_balance,
    capacities_drop_something,
    capacity_is_for_choices_by_score,
    choices_leave_some_expert_out,
    expert_groups_hold_the_chosen,
    expert_groups_limit_choices,
    expert_layouts_need_experts,
    expert_ranks_divide_the_world,
    experts_are_in_some_layer,
    experts_divide_among_ranks,
    experts_need_sequence_parallel,
    fused_exchanges_are_in_bfloat16,
    fused_exchanges_are_over_whole_experts,
    loads_can_be_uneven,
    offsets_follow_the_next_best_expert,
    one_expert_needs_a_weight,
    padded_capacities_travel_by_row,
    rows_are_bounded_below_the_most,
    sinkhorn_has_weights_of_its_own,
    symmetric_exchanges_are_of_few_experts,
    tokens_choose_among_the_experts,
    tokens_travel_by_some_way,
)
from megalith.config.pipeline_rules import (
    interleaved_micro_batches_fill_the_pipeline,
    pipeline_settings_need_a_pipeline,
    schedule_fits_the_stages,
    split_backwards_split_every_product,
    stage_layers_are_those_of_the_model,
    stages_have_layers,
)
from megalith.config.relevance import no_setting_is_without_effect
from megalith.config.t5_rules import (
    answers_are_not_split,
    distances_go_past_the_exact_buckets,
    stacks_of_t5_are_plain,
)
from megalith.config.training_rules import (
    best_checkpoint_is_evaluated,
    compiler_chooses_what_outputs_are_kept,
    evaluation_has_data,
    experimental_features_are_switched_on,
    loss_scale_starts_above_its_minimum,
    mup_is_of_adamw,
    nesterov_needs_momentum,
    overrides_change_something,
    rates_fall_to_their_minimum,
    recomputed_operations_are_named_once,
    schedule_stages_differ,
    switched_on_features_are_used,
    warmup_ends_before_decay,
    wsd_decay_fits,
)

__all__ = ["MODEL_RULES", "RUN_RULES", "Rule", "broken"]

Rule = Callable[[Draft], Iterator[Violation]]

_SHAPE_RULES: tuple[Rule, ...] = (
    heads_divide_hidden_size,
    rotated_features_are_even,
    query_groups_divide_heads,
    latent_heads_are_those_of_mla,
    sections_are_all_pairs,
    scores_have_one_scale,
    local_base_needs_a_window,
    scaling_counts_rotations_of_a_pair,
    yarn_has_one_attention_factor,
    tokens_choose_among_the_experts,
    one_expert_needs_a_weight,
    expert_groups_hold_the_chosen,
    balanced_choices_need_no_other_balance,
    sinkhorn_has_weights_of_its_own,
    offsets_follow_the_next_best_expert,
    capacity_is_for_choices_by_score,
    only_decoders_write,
    classes_are_counted,
    negatives_are_of_queries,
    queries_have_negatives,
    bert_positions_are_learned,
    distances_go_past_the_exact_buckets,
    stacks_of_t5_are_plain,
)

# for the settings of a model without a run
MODEL_RULES: tuple[Rule, ...] = (*_SHAPE_RULES, positions_are_given, no_setting_is_without_effect)

RUN_RULES: tuple[Rule, ...] = (
    *_SHAPE_RULES,
    positions_reach_the_sequence,
    modules_predict_within_the_sequence,
    degrees_multiply_to_the_world_size,
    heads_divide_among_tensor_ranks,
    query_groups_divide_among_tensor_ranks,
    sequence_parallel_needs_tensor_parallel,
    sequence_divides_among_tensor_ranks,
    context_method_needs_context_parallel,
    sequence_divides_among_context_ranks,
    two_levels_divide_context,
    heads_divide_among_context_ranks,
    answers_are_not_split,
    hidden_size_divides_among_shards,
    batches_divide_among_ranks,
    expert_layouts_need_experts,
    expert_ranks_divide_the_world,
    experts_divide_among_ranks,
    experts_need_sequence_parallel,
    fused_exchanges_are_in_bfloat16,
    fused_exchanges_are_over_whole_experts,
    symmetric_exchanges_are_of_few_experts,
    padded_capacities_travel_by_row,
    rows_are_bounded_below_the_most,
    tokens_travel_by_some_way,
    capacities_drop_something,
    loads_can_be_uneven,
    expert_groups_limit_choices,
    choices_leave_some_expert_out,
    experts_are_in_some_layer,
    pipeline_settings_need_a_pipeline,
    schedule_fits_the_stages,
    split_backwards_split_every_product,
    stages_have_layers,
    stage_layers_are_those_of_the_model,
    interleaved_micro_batches_fill_the_pipeline,
    schedule_stages_differ,
    warmup_ends_before_decay,
    wsd_decay_fits,
    rates_fall_to_their_minimum,
    overrides_change_something,
    mup_is_of_adamw,
    nesterov_needs_momentum,
    several_datasets_have_names,
    weights_are_of_several_datasets,
    weights_name_every_dataset,
    blended_datasets_are_drawn,
    phases_follow_each_other,
    blends_have_no_classes,
    evaluation_has_data,
    best_checkpoint_is_evaluated,
    recomputed_operations_are_named_once,
    compiler_chooses_what_outputs_are_kept,
    loss_scale_starts_above_its_minimum,
    fp8_has_no_loss_scale,
    fp8_sizes_are_aligned,
    fp8_splits_no_block,
    fp8_sequences_are_whole_blocks,
    fp8_leaves_layers,
    experimental_features_are_switched_on,
    switched_on_features_are_used,
    no_setting_is_without_effect,
)


def broken(draft: Draft, rules: Sequence[Rule] = RUN_RULES) -> list[Violation]:
    """Returns the violations of ``rules`` in ``draft``; a rule ends at the first setting that is unknown."""
    found: list[Violation] = []
    for rule in rules:
        with suppress(Unknown):
            for violation in rule(draft):  # not extend(): keep what was found before the unknown setting
                found.append(violation)
    return found
