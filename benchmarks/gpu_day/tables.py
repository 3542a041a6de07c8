"""Results in words: a line per row, the environment, and whether the targets are met."""

HIGHEST, LOWEST = "at least", "under"


def shown(row, name, form):
    """A figure of a row, or a dash."""
    value = row.get(name)
    return "-" if value is None else form(value)


def giga(value):
    return f"{value / 1e9:.3g}"


def percent(value):
    return f"{value:.1%}"


def gib(value):
    return f"{value / 2**30:.2f}"


def times(value):
    return f"{value:.2f}"


def cut(row):
    """Shards and micro-batches of a step."""
    parts = [f"{len(row['boundaries'])} sh" if "boundaries" in row else "", shown(row, "micro_batches", "{} mb".format)]
    return " ".join(part for part in parts if part)


HEAD = (
    "what", "model", "cap", "tokens", "cut", "tokens/s", "s/step (range)", "of bound", "bound by", "of matmul",
    "exposed", "x resident", "x FSDP2", "up GB", "down GB", "GiB device", "GiB host", "plan s",
)  # fmt: skip


def cells(row):
    """A row of the table."""
    place = (row["method"], row["size"], row["memory"] or "-", str(row["tokens"] or "-"))
    if row["status"] != "ok":
        return (*place, row["status"] + (f": {row['reason']}" if "reason" in row else ""))
    seconds = "-"
    if "step_s" in row:
        seconds = f"{row['step_s']:.3f} ({row['step_s_least']:.3f} to {row['step_s_most']:.3f})"
    return (
        *place,
        cut(row),
        shown(row, "tokens_per_s", lambda value: f"{value:,.0f}"),
        seconds,
        shown(row, "share_of_bound", percent),
        row.get("binding", "-"),
        shown(row, "kernels_of_matmul_peak", percent),
        shown(row, "exposed_share", percent),
        shown(row, "times_resident", times),
        shown(row, "times_fsdp2", times),
        shown(row, "loaded_bytes", giga),
        shown(row, "stored_bytes", giga),
        shown(row, "device_peak_bytes", gib),
        shown(row, "host_peak_bytes", gib),
        shown(row, "plan_s", lambda value: f"{value:.1f}"),
    )


def table(rows):
    """Lines with aligned columns; a row that ends early, with a reason, runs on."""
    widths = [max(len(row[k]) for row in rows if len(row) == len(HEAD)) for k in range(len(HEAD))]
    for row in rows:
        widths[:4] = [max(width, len(cell)) for width, cell in zip(widths, row[:4], strict=False)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def environment(row):
    """The environment and its ceilings, in lines."""
    if row["status"] != "ok":
        return [f"machine: {row['status']} {row.get('reason', '')}".rstrip()]
    gpu = "no GPU: emulated" if row["gpu"] is None else f"{row['gpu']}, {gib(row['gpu_bytes'])} GiB"
    both = row["both_bytes_per_s"]
    return [
        f"{gpu}; driver {row.get('driver', '-')}; PCIe {row.get('pcie', '-')}; CUDA {row.get('cuda', '-')}",
        f"{row['cores']} cores ({row['cpu']}), {row['threads']} intra-op threads, {gib(row['dram_bytes'])} GiB of DRAM",
        f"{row['system']}, Python {row['python']}, torch {row['torch']}",
        f"link: up {giga(row['up_bytes_per_s'])} GB/s, down {giga(row['down_bytes_per_s'])}, "
        f"both at once {'-' if both is None else giga(both)}; DRAM: triad {giga(row['triad_bytes_per_s'])} GB/s, "
        f"in place {giga(row['in_place_bytes_per_s'])}; bfloat16 matmul {row['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]


def judged(rows):
    """A line for each target: which rows meet it."""
    rows = [row for row in rows if row["status"] == "ok"]
    streamed = [row for row in rows if row["method"] == "engine"]
    two = [row for row in rows if row["method"] == "interleaved"]
    compute_bound = [row for row in streamed if row.get("binding") == "compute"]
    at_16k = [row for row in streamed if row["tokens"] == 16384]
    return [
        verdict("of the lower bound", streamed, "share_of_bound", HIGHEST, 0.90),
        verdict("of resident tokens/s, where compute binds", compute_bound, "times_resident", HIGHEST, 0.95),
        verdict("times FSDP2's tokens/s, 16,384 tokens", at_16k, "times_fsdp2", HIGHEST, 1.5),
        verdict("of a step exposed to the optimizer, two models", two, "exposed_share", LOWEST, 0.05),
    ]


def verdict(what, rows, name, side, limit):
    """Whether every row that has the figure meets a limit."""
    values = [row[name] for row in rows if name in row]
    if not values:
        return f"{what}: {side} {limit}: not measured"
    good = sum(value >= limit if side == HIGHEST else value < limit for value in values)
    found = f"{min(values):.3f} to {max(values):.3f}"
    return f"{what}: {side} {limit}: {found}, {good} of {len(values)} rows: {'yes' if good == len(values) else 'NO'}"


def summary(rows, is_emulated):
    """All that there is to say of all rows, of which the first is the machine's."""
    measured = [row for row in rows if row["method"] != "machine"]
    lines = [*environment(rows[0]), "", *table([HEAD, *(cells(row) for row in measured)]), ""]
    if is_emulated:
        return [*lines, "emulated: the script runs; its figures say nothing of a GPU"]
    return lines + judged(rows)
