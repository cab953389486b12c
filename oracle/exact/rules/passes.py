"""Operators that need no rule: they move numbers, choose among them or compare them.

Views pass by their own mark; operators without floating-point tensors pass too. Whatever is in neither
list nor table is refused by name.
"""

# Signs, comparisons and choices: nothing is rounded but to integers.
ELEMENTWISE = """
    floor_divide neg abs sign sgn maximum minimum fmax fmin clamp clamp_min clamp_max where relu threshold
    threshold_backward hardtanh hardtanh_backward round floor ceil trunc frac fmod remainder positive copysign
    nan_to_num masked_fill eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and
    bitwise_or bitwise_not isnan isinf isfinite isposinf isneginf isclose allclose signbit heaviside relu6
"""

# Numbers are copied, placed, picked or put in order.
MOVEMENT = """
    clone copy cat stack index gather index_select scatter masked_scatter_backward index_copy index_fill select_backward
    slice_backward slice_scatter select_scatter as_strided_scatter diagonal_scatter diagonal_backward
    flip roll repeat constant_pad_nd tril triu masked_select masked_scatter _unsafe_view
    _reshape_alias lift_fresh lift alias_copy fill zero nonzero nonzero_static repeat_interleave take
    unfold_copy view_copy expand_copy permute_copy t_copy transpose_copy squeeze_copy
    unsqueeze_copy detach_copy split_copy split_with_sizes_copy chunk_cat _chunk_cat _pin_memory pin_memory
    _local_scalar_dense is_same_size equal resize resize_ set_ record_stream is_pinned block_diag
    diag_embed reflection_pad1d replication_pad1d channel_shuffle pixel_shuffle
"""

# The greatest, the least, the order: the same whatever order they are looked for in.
ORDER = """
    amax amin aminmax max min argmax argmin sort argsort topk any all cummax cummin median kthvalue mode
    searchsorted bucketize isin unique_dim _unique2 unique_consecutive histc count_nonzero
"""

CREATION = """
    empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like
    new_ones full full_like new_full arange linspace eye scalar_tensor rand rand_like randn randn_like
    randint randint_like randperm bernoulli normal normal_functional uniform exponential random log_normal
    multinomial
"""

PASSES = {f"aten::{name}" for group in (ELEMENTWISE, MOVEMENT, ORDER, CREATION) for name in group.split()} | {
    "prim::device",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_size",
    "aten::sym_numel",
    "aten::sym_stride",
    "aten::sym_storage_offset",
    "aten::is_contiguous",
}
