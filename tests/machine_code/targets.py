"""The targets for the counts of the kernels."""

from __future__ import annotations

from pagedkv.bench.report import Row

from .variants import SHORT, STRETCHES, WGMMA


def _split_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """For kernel split: name, rows, column, limit, and 1 for an upper limit or -1 for a lower one.

    Of usual shapes; for 8.0, instructions leave out e4m3, which is converted by arithmetic there.
    """
    split = [row for row in rows if row["kernel"] == "split"]
    usual = [row for row in split if row["G"] <= 16 and row["kv"] != "float32"]
    converted = [row for row in usual if (row["kv"], row["cc"]) != ("fp8_e4m3", "8.0")]
    of_9_0 = [row for row in usual if row["cc"] == "9.0"]
    plain, short = ([row for row in of_9_0 if row["case"] == case] for case in ("-", SHORT))
    half, short_half = ([row for row in of if row["kv"] == row["q"]] for of in (plain, short))
    return [
        *((f"split: {name}", split, name, 0, 1) for name in ("spill B", "stack B")),
        ("split: thread blocks on a multiprocessor", usual, "blocks/SM", 2, -1),
        ("split: loop", converted, "loop instr/512B", 60.0, 1),
        ("split: KV in flight KiB", usual, "KV in flight KiB", 48, -1),
        ("split: KV sectors", [row for row in plain if row["D"] * row["G"] <= 2048], "KV sectors", 1.01, 1),
        ("split: wavefronts", plain, "wavefronts", 1.1, 1),
        ("split: all, 16 bits, G 1 to 16", half, "instr/512B", 40.0, 1),
        ("split: short splits, all, 16 bits, G 1 to 16", short_half, "instr/512B", 60.0, 1),
        ("split: all, int8", [row for row in plain if row["kv"] == "int8"], "instr/512B", 60.0, 1),
        ("split: partials", plain, "partials", 0.04, 1),
        ("split: short splits, partials", short, "partials", 0.13, 1),
    ]


def _prefill_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """For kernel prefill, as `_split_targets`: 16-bit caches, causal, without options; spills to 128 dims with them."""
    all_ = [row for row in rows if row["kernel"] == "prefill"]
    plain = [row for row in all_ if _is_plain(row)]
    of_9_0 = [row for row in plain if row["cc"] == "9.0"]
    result = [(f"prefill: {name}", _few_dims_or_plain(all_), name, 0.0, 1) for name in ("spill B", "stack B")]
    of_128 = [row for row in plain if row["D"] == 128]
    result.append(("prefill: thread blocks on a multiprocessor, D 128", of_128, "blocks/SM", 2.0, -1))
    for head_dim, other, matrices in ((64, 3.3, 0.32), (128, 2.0, 0.32), (256, 1.8, 0.57)):
        among = [row for row in of_9_0 if row["D"] == head_dim]
        result.append((f"prefill: other instructions per mma, D {head_dim}", among, "other/mma", other, 1))
        result.append((f"prefill: ldmatrix per mma, D {head_dim}", among, "ldmatrix/mma", matrices, 1))
    half = {row["D"]: row["other/mma"] for row in of_9_0 if row["G"] == 4 and row["q"] == "float16"}
    fp8 = [row for row in all_ if row["cc"] == "9.0" and row["kv"].startswith("fp8")]
    of_fp8 = [row for row in fp8 if half.get(row["D"]) is not None]
    counted = [row for row in of_fp8 if row["other/mma"] is not None]
    more = [row | {"more other/mma": row["other/mma"] - half[row["D"]]} for row in counted]
    result.append(("prefill: other instructions per mma, fp8, more", more, "more other/mma", 0.6, 1))
    result += [(f"prefill: {name}", of_9_0, name, 1.01, 1) for name in ("wavefronts", "KV sectors")]
    return [*result, *_few_rows_targets(rows)]


def _is_plain(row: Row) -> bool:
    return row["case"] == "-" and row["kv"] == row["q"]


def _few_dims_or_plain(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["D"] <= 128 or _is_plain(row)]


def _few_rows_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """For kernel prefill_split, as `_prefill_targets`."""
    all_ = [row for row in rows if row["kernel"] == "prefill_split"]
    plain = [row for row in all_ if _is_plain(row)]
    of_9_0 = [row for row in plain if row["cc"] == "9.0"]
    of_32 = [row for row in of_9_0 if row["D"] <= 128]  # rows of a warp; with 256 dims it has 16
    return [
        *((f"prefill_split: {name}", _few_dims_or_plain(all_), name, 0.0, 1) for name in ("spill B", "stack B")),
        ("prefill_split: loop, D 64 and 128", of_32, "loop instr/512B", 18.0, 1),
        *((f"prefill_split: {name}", of_9_0, name, 1.01, 1) for name in ("wavefronts", "KV sectors")),
        ("prefill_split: partials", of_9_0, "partials", 0.14, 1),
    ]


def _wgmma_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """For kernel prefill_wgmma, as `_split_targets`: spills with options, too; the rest causal, without options."""
    all_ = [row for row in rows if row["kernel"] == WGMMA]
    plain = [row for row in all_ if row["case"] == "-"]
    result = [(f"wgmma: {name}", all_, name, 0.0, 1) for name in ("spill B", "stack B", "moves", "late MUFU")]
    limits = (("other/tile", 490.0), ("before wgmma", 12.0), ("wavefronts", 1.01), ("KV sectors", 1.01))
    limits += (("written sectors", 1.0),)
    return result + [(f"wgmma: {name}", plain, name, limit, 1) for name, limit in limits]


def _stretches_targets(rows: list[Row]) -> list[tuple[str, list[Row], str, float, int]]:
    """For the kernels of few KV heads, as `_split_targets`: their loops are those of prefill and wgmma."""
    all_ = [row for row in rows if row["kernel"] in STRETCHES]
    limits = (("spill B", 0.0), ("stack B", 0.0), ("moves", 0.0), ("other/mma", 2.0), ("other/tile", 480.0))
    limits += (("wavefronts", 1.01), ("KV sectors", 1.01))
    return [(f"stretches: {name}", all_, name, limit, 1) for name, limit in limits]


def targets(rows: list[Row]) -> list[Row]:
    """Each target, its worst row, and whether that reaches it.

    Those of code and traffic are for v1 and v2 at P in {8, 16, 32} and D <= 256, and for split on 9.0 at D in
    {64, 128, 256}.
    """
    grid = [row for row in rows if row["kernel"] in ("v1", "v2") and row["P"] <= 32 and row["D"] <= 256]
    most = {"spill B": 0, "stack B": 0, "K sectors": 1.05, "V sectors": 1.05}
    wanted = [(name, grid, name, float(limit), 1) for name, limit in most.items()]
    wanted += [("K load B", grid, "K load B", 16, -1), *_split_targets(rows), *_prefill_targets(rows)]
    wanted += [*_wgmma_targets(rows), *_stretches_targets(rows)]
    wanted.append(("external", rows, "external", 0, 1))
    result = []
    for label, among, name, limit, sign in wanted:
        having = [row for row in among if row.get(name) is not None]
        worst = max(having, key=lambda row: sign * row[name], default=None)
        if worst is not None:
            reached = "yes" if sign * worst[name] <= sign * limit else "no"
            misses = sum(sign * row[name] > sign * limit for row in having)
            where = " ".join(
                str(worst[key]) for key in ("kernel", "q", "of", "kv", "D", "G", "P", "case", "cc") if key in worst
            )
            result.append(
                {"target": label, "limit": limit, "worst": worst[name], "reached": reached, "misses": misses}
                | {"rows": len(having), "worst row": where}
            )
    return result
