"""The best items without storing all scores: Mosaic GPU programs for Hopper.

`maxima` computes scores in registers (`score_tiles`) and keeps the largest of each group of 16
neighbours. `scores_of_groups` computes the scores of the chosen groups a second time. These
have equal bits, because `wgmma` sums each product in one order. If the second computation would
take longer than writing all scores and reading some, `maxima` also writes all scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import mosaic as plgpu
from pallas_kernels import score_tiles as tiles
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, STEP, num_programs, store, transforms
from pallas_kernels.output_loss import ItemLayer, listed, load_labels, word_and_bit
from pallas_kernels.selection import members, pick

GROUP = 16
BLOCK = tiles.COLUMNS  # number of items over which a warpgroup computes a maximum
_GROUPS = BLOCK // GROUP
# First items of the groups whose scales and biases are loaded in advance, if they come from global
# memory.
_AHEAD = range(0, 2 * GROUP, GROUP)
_STORE = 32  # number of columns that are written at once: 128 bytes


def maxima(
    h: Shaped[Array, "batch hidden"],
    kernel: Shaped[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "counted words"] | None,
    *,
    start: jax.typing.ArrayLike,
    size: int,
    limit: jax.typing.ArrayLike,
    with_scores: bool,
    margins: tuple[Float[Array, "batch"], Float[Array, "batch"]] | None = None,
) -> list[Float[Array, "batch _"]]:
    """Maxima of the scores of items `start .. start + size - 1`: of each 16 and each 128 items.

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i
        score_bi = (h_b . kernel_i + margin_b) unit_b scale_i + bias_i       with int8

    A score is -inf if the bias is -inf, if `words` has a bit for it, or if there is no
    item. The maximum of NaN and other numbers is NaN.

    Args:
      h: bfloat16 or int8; `score_tiles.rows_for` gives the number of rows.
      kernel: bfloat16 or int8, as `h`, with a shape that `score_tiles.unsupported`
        allows.
      bias: float32 or None.
      scale: float32 or None.
      words: bits of the items to exclude, counted, see `output_loss.label_words`; or None.
      start: first item.
      size: number of items, a multiple of 256.
      limit: rows of the kernel from this one on are no items.
      with_scores: whether to return all scores in place of the maxima of each 128. Then the
        number of rows is a multiple of 128.
      margins: for int8 the margin and the unit of each row, float32; None for bfloat16.
    """
    batch = h.shape[0]
    of_rows = [] if margins is None else list(margins)
    layer = ItemLayer(bias, scale)

    def epilogue(make, row, column, warpgroup, scalars, inputs, outputs, smem):
        first, end = scalars
        rows_refs, inputs = inputs[: len(of_rows)], inputs[len(of_rows) :]
        layer_refs, *words_refs = layer.split(inputs)
        maxima_gmem, more_gmem = outputs
        labels = [load_labels([ref], row, column) for ref in words_refs]
        rows = [tiles.row_vector(ref, row) for ref in rows_refs]
        item = first + column
        if with_scores:  # the scores take all of the shared memory
            ahead = [layer.load(layer_refs, item + c, GROUP) for c in _AHEAD]
            products = make()
        else:
            # Loading the numbers of a group when they are needed would be slow. So a thread loads
            # one number of each vector during the products, and all threads read them from there.
            mine = [tiles.one_each(ref, item, BLOCK) for ref in layer_refs]
            products = make()
            layer_refs = [smem.at[warpgroup, n] for n in range(len(mine))]
            for ref, numbers in zip(layer_refs, mine, strict=True):
                store(ref, numbers)
            item, ahead = 0, []

        def group(c, products, words, masked, loaded):
            scores = products[:, c : c + GROUP]
            if rows:
                margin, unit = (tiles.spread_rows(x, GROUP) for x in rows)
                scores = (scores.astype(jnp.float32) + margin) * unit
            scores = layer.applied(loaded, scores)
            denied = layer.denied(loaded)
            denied += [listed(x, c, GROUP) for x in words]
            if masked:
                inside = end - (first + column + c)
                denied.append(tiles.column_numbers(GROUP) >= inside)
            for x in denied:
                scores = jnp.where(x, -jnp.inf, scores)
            return scores

        def finish(masked, words):
            operands = products, words
            if masked:  # the branches are those of `output_loss.slopes`
                operands = lax.optimization_barrier(operands)
            places = tiles.column_numbers(_GROUPS)
            largest = places.astype(jnp.float32)
            # The numbers of later groups are loaded while earlier groups are computed.
            coming = [*ahead] or [layer.load(layer_refs, item, GROUP)]
            further = GROUP * len(coming)
            for c in range(0, BLOCK, _STORE):
                pieces = []
                for i in range(c, c + _STORE, GROUP):
                    if (later := i + further) < BLOCK:
                        coming.append(layer.load(layer_refs, item + later, GROUP))
                    made, bits = operands
                    scores = group(i, made, bits, masked, coming.pop(0))
                    pieces.append(scores)
                    here = tiles.spread_rows(jnp.max(scores, axis=1), _GROUPS)
                    largest = jnp.where(places == i // GROUP, here, largest)
                if not with_scores:
                    continue
                # Waits until an earlier copy from the buffer has ended.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                smem[warpgroup] = lax.concatenate(pieces, 1)
                plgpu.commit_smem()
                target = pl.ds(row, ROWS), pl.ds(column + c, _STORE)
                plgpu.copy_smem_to_gmem(smem.at[warpgroup], more_gmem.at[*target])
            at = pl.ds(pl.multiple_of(div(column, GROUP), _GROUPS), _GROUPS)
            store(maxima_gmem.at[pl.ds(row, ROWS), at], largest)
            if not with_scores:
                target = more_gmem.at[pl.ds(row, ROWS), div(column, BLOCK)]
                store(target, jnp.max(largest, axis=1))

        words = [each for each, _ in labels]
        is_rare, usual = first + column + BLOCK > end, words
        if not with_scores:  # with many items, most tiles have no excluded item
            usual = []
            for _, counts in labels:
                is_rare |= sum(counts) > 0
        lax.cond(is_rare, lambda: finish(True, words), lambda: finish(False, usual))

    more = size if with_scores else size // BLOCK
    if with_scores:
        scratch = plgpu.SMEM(
            (tiles.WARPGROUPS, ROWS, _STORE),
            jnp.float32,
            transforms=(
                plgpu.TilingTransform((8, _STORE)),
                plgpu.SwizzleTransform(4 * _STORE),
            ),
        )
    else:
        shape = tiles.WARPGROUPS, len(layer.arrays()), BLOCK
        scratch = plgpu.SMEM(shape, jnp.float32) if layer.arrays() else None
    return tiles.score_tiles(
        "maxima",
        epilogue,
        h,
        kernel,
        (start, limit),
        [*of_rows, *layer.arrays(), *([] if words is None else [words])],
        [
            jax.ShapeDtypeStruct((batch, count), jnp.float32)
            for count in (size // GROUP, more)
        ],
        start=start,
        size=size,
        scratch=scratch,
    )


def scores_of_groups(
    h: Float[Array, "padded hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    scale: Float[Array, "items"] | None,
    words: Int[Array, "counted words"] | None,
    groups: Int[Array, "batch groups"],
    *,
    start: jax.typing.ArrayLike,
    limit: jax.typing.ArrayLike,
) -> Float[Array, "batch scores"]:
    """All scores of the given groups; `maxima` returns only the largest of each group.

    A program has one row, or a part of its groups if there are few rows. It multiplies 64 items by
    eight rows of `h`, as `wgmma` needs, and uses the scores of one row. The other rows take no
    extra time: reading items takes longer than the products.

    Args:
      groups: numbers of groups, counted from item `start`. The other arguments are those
        of `maxima`.
    """
    hidden, (batch, wanted) = h.shape[1], groups.shape
    across = ROWS // GROUP
    parts = max(1, min(2 * num_programs() // batch, pl.cdiv(wanted, across)))
    groups = jnp.pad(groups, ((0, 0), (0, -wanted % (across * parts))))
    count = groups.shape[1]
    places = members(groups, GROUP)
    items = start + places
    beside = [None if x is None else x[items] for x in (scale, bias)]
    width = next(n for n in (4 * STEP, 2 * STEP, STEP) if hidden % n == 0)
    steps = hidden // width
    of_part = count // across // parts  # number of blocks of 64 items in a part
    total = of_part * steps
    stages = min(3, total)

    def scores_of_groups_body(groups_gmem, h_gmem, kernel_gmem, *refs):
        *layer_refs, out_gmem = refs
        row, before = lax.axis_index("row"), lax.axis_index("part") * of_part
        others = pl.multiple_of(div(row, 8) * 8, 8)

        def scope(items_smem, h_smem, full):
            def copy(i):
                slot, tile = rem(i, stages), before + div(i, steps)
                at = pl.ds(rem(i, steps) * width, width)
                plgpu.copy_gmem_to_smem(
                    h_gmem.at[pl.ds(others, 8), at], h_smem.at[slot], full.at[slot]
                )
                for j in range(across):
                    first = groups_gmem[row, tile * across + j] * GROUP
                    first = pl.multiple_of(first, GROUP)
                    plgpu.copy_gmem_to_smem(
                        kernel_gmem.at[pl.ds(first, GROUP), at],
                        items_smem.at[slot, pl.ds(j * GROUP, GROUP)],
                        full.at[slot],
                    )

            @pl.loop(0, stages)
            def _(i):
                copy(i)

            @pl.loop(0, of_part)
            def _(tile):
                def multiply(sums):
                    @pl.loop(0, steps)
                    def _(k):
                        i = tile * steps + k
                        slot = rem(i, stages)
                        plgpu.barrier_wait(full.at[slot])
                        rows = h_smem.at[slot].transpose((1, 0))
                        plgpu.wgmma(sums, items_smem.at[slot], rows)
                        plgpu.wgmma_wait(0)

                        @pl.when(i + stages < total)
                        def _():
                            copy(i + stages)

                    return sums[...]

                products = pl.run_scoped(multiply, plgpu.ACC((ROWS, 8)))
                mine = tiles.column_numbers(8) == row - others
                scores = jnp.max(jnp.where(mine, products, -jnp.inf), axis=1)
                at = pl.ds((before + tile) * ROWS, ROWS)
                layer = [
                    plgpu.load(
                        ref.at[row, at],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    for ref in layer_refs
                ]
                if scale is not None:
                    scores = scores * layer[0]
                if bias is not None:
                    scores = scores + layer[-1]
                out_gmem[row, at] = scores

        pl.run_scoped(
            scope,
            plgpu.SMEM((stages, ROWS, width), h.dtype, transforms=transforms()),
            plgpu.SMEM((stages, 8, width), h.dtype, transforms=transforms()),
            plgpu.Barrier(num_arrivals=1 + across, num_barriers=stages),
        )

    scores_of_groups_body.__name__ = "scores_of_groups"
    scores = plgpu.kernel(
        scores_of_groups_body,
        out_type=jax.ShapeDtypeStruct((batch, count * GROUP), jnp.float32),
        grid=(batch, parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # as in `maxima`, because both must compute equal bits
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(
        jnp.floor_divide(start, GROUP) + groups,
        h,
        kernel,
        *(x for x in beside if x is not None),
    )
    denied = items >= limit
    if words is not None:
        denied |= has_label(words[:batch], places)
    if bias is not None:
        denied |= beside[1] == -jnp.inf
    return jnp.where(denied, -jnp.inf, scores)[:, : wanted * GROUP]


def has_label(
    words: Int[Array, "batch words"], columns: Int[Array, "batch count"]
) -> Bool[Array, "batch count"]:
    """Whether the bits of these columns are set; see `output_loss.label_words`."""
    word, bit = word_and_bit(columns)
    return lax.shift_right_logical(pick(words, word), bit) % 2 != 0
