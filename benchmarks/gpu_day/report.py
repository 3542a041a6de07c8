"""The tables of the README, made of the rows in a folder."""

from pathlib import Path

from bounds import LayerSeconds, bound, compute_s, difference
from peers import PEERS
from rows import Results
from scales import EMULATED, GPU
from stages import CHECKS, LONG_RUNS, RESIDENT, VARIANTS, stages

UNMEASURED = "not measured on a GPU"
LEAST_OF_BOUND, LEAST_OF_RESIDENT = 0.95, 0.98
MOST_OF_EXACT, MOST_OF_STALE = 1 / 2, 1 / 1.2  # of a peer's time, that ours may take with several models
MOST_LOSS = 0.03  # difference of losses in bfloat16, as a share of their fall
STALE = "roundpipe_stale"


def report(folder):
    """Every table, in Markdown; figures are those of a GPU alone."""
    folder = Path(folder)
    measured = {name: Results(folder, name, "gpu") for name in stages(GPU)}
    size = GPU.size
    parts = [
        ("Facts", table(("what", "found"), facts(measured["facts"]))),
        ("Right", table(("check", "goal", "found"), right(measured["right"]))),
        (f"One model of {size} parameters, {GPU.memory}", one(measured)),
        (f"Homes: one model of {size} parameters", homes(measured)),
        (f"{GPU.num_models} models of {size} parameters interleaved, {GPU.memory}", four(measured)),
        (f"One model of {GPU.larger_size} parameters, {GPU.memory}", three(measured)),
        ("Losses", table(("what", "goal", "found"), losses(measured))),
    ]
    lines = [line for title, body in parts for line in (f"### {title}", "", *body, "")]
    return "\n".join([*lines, *emulated(folder)]).rstrip()


def emulated(folder):
    """What an emulated run shows: which rows ran, and why others did not."""
    lines = []
    for name, stage in stages(EMULATED).items():
        results = Results(folder, name, "emulated")
        if results.rows:
            bad = [row for row in results.rows.values() if row["status"] != "ok"]
            lines.append(f"- {name}: {len(results.rows) - len(bad)} of {len(stage.rows())} rows ran")
            lines += [f"  - {row['method']} {row['tokens'] or ''}: {row['status']}, {row['reason']}" for row in bad]
    return ["On the emulated device, which shows that the script runs:", "", *lines] if lines else []


def table(head, rows):
    """Lines of a table."""
    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def line(cells):
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def cell(results, key, form, last=None):
    """A figure, why it failed, or that nobody measured it; and on which day, where that is not the `last` one."""
    row = results.rows.get(key)
    if row is None:
        return UNMEASURED
    text = form(row) if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
    return text if last in (None, row["day"]) else f"on {row['day']}, {text}"


def last_day(measured):
    """The day of the latest row, or None."""
    return max((row["day"] for results in measured.values() for row in results.rows.values()), default=None)


def giga(value):
    return f"{value / 1e9:.4g}"


def gib(value):
    return f"{value / 2**30:.1f}"


# Facts


def facts(results):
    """A row for each fact."""
    forms = {
        "environment": environment,
        "ceilings": lambda row: (
            f"up {giga(row['up_bytes_per_s'])} GB/s, down {giga(row['down_bytes_per_s'])}; both at once "
            f"{giga(row['both_up_bytes_per_s'])} and {giga(row['both_down_bytes_per_s'])}; copies in DRAM "
            f"{giga(row['dram_bytes_per_s'])}; bfloat16 products {row['matmul_flops']['bfloat16'] / 1e12:.4g} TFLOP/s"
        ),
        "stream": lambda row: "; ".join(
            f"{num} threads: {giga(rate)} GB/s, in place {giga(row['in_place_bytes_per_s'][num])}"
            for num, rate in row["triad_bytes_per_s"].items()
        ),
        "beside traffic": lambda row: (
            f"up {giga(row['up_bytes_per_s'])} GB/s, down {giga(row['down_bytes_per_s'])}; both at once "
            f"{giga(row['both_up_bytes_per_s'])} and {giga(row['both_down_bytes_per_s'])}; traffic "
            f"{giga(row['traffic_bytes_per_s'])}"
        ),
        "page-locking": lambda row: (
            f"{row['lock_s_per_gb']:.3f} s/GB to take, touch and lock, {row['touch_s_per_gb']:.3f} to take and touch "
            f"alone, {row['let_go_s_per_gb']:.3f} to let go"
        ),
        "wake-up": lambda row: f"{row['blocking_s'] * 1e6:.1f} us asleep, {row['asking_s'] * 1e6:.1f} asking",
    }
    names = {
        "environment": "machine",
        "ceilings": "link, matrix products",
        "stream": "STREAM's triad",
        "beside traffic": "link beside traffic in DRAM",
        "page-locking": "page-locking",
        "wake-up": "from a kernel's end until the host knows",
    }
    return [(names[name], cell(results, (name, "", "", 0), form)) for name, form in forms.items()]


def environment(row):
    told = row["told"]
    return (
        f"{row['gpu']}, {gib(row['gpu_bytes'])} GiB, driver {told['driver_version']}, PCIe "
        f"{told.get('pcie.link.gen.max')} x {told.get('pcie.link.width.max')}; {row['cores']} cores ({row['cpu']}), "
        f"{gib(row['dram_bytes'])} GiB of DRAM, huge pages {row['huge_pages']}; {row['system']}, Python "
        f"{row['python']}, torch {row['torch']}, CUDA {row['cuda']}"
    )


def right(results):
    """A row for each check."""
    forms = {
        "gpu tests": ("all pass", lambda row: row["said"]),
        "gpu tests, timed": ("all pass", lambda row: row["said"]),
        "races, kept graphs": ("same bits", raced),
        "races, no room for boundaries": ("same bits", raced),
        "sticky error": (
            "exit code 75, resumed to the same bits",
            lambda row: f"exit code {row['exit_code']}, {'same' if row['same_bits'] else 'OTHER'} bits",
        ),
    }
    return [(name, forms[name][0], cell(results, (name, "", "", 0), forms[name][1])) for name in CHECKS]


def raced(row):
    """Every way of holding the device back gave the same bits, or the row had failed."""
    num = max(each["num_held"] for each in row["held_back"].values())
    return f"same bits, {len(row['held_back'])} ways of holding back up to {num} kernels"


# Speed


def one(measured):
    """Every method at each length of step."""
    of_bound, of_resident = (
        f"of the bound at least {LEAST_OF_BOUND:.0%}",
        f"of resident at least {LEAST_OF_RESIDENT:.2f}",
    )
    goals = {"engine": f"{of_bound}; {of_resident} where compute hides all"}
    methods = ["engine", *VARIANTS, *PEERS]
    return speeds(measured, "one", GPU.size, methods, GPU.tokens, goals)


def three(measured):
    goals = {"engine": f"of the bound at least {LEAST_OF_BOUND:.0%}"}
    return speeds(measured, "three", GPU.larger_size, ["engine"], GPU.tokens[:2], goals)


def homes(measured):
    """With layers at home on the device, and beside whom: with no cap, and under one."""
    said = cell(measured["homes"], ("tests of homes", "", "", 0), lambda row: row["said"])
    found = [f"The kernel's bits against the host's, and the other tests of homes: {said}", ""]
    goals = ({"homes": f"of resident at least {LEAST_OF_RESIDENT:.2f}"}, {"homes": "ahead of the engine without"})
    for memory, goal in zip(("", GPU.memory), goals, strict=True):
        methods = ["homes", "engine", *([] if memory else [RESIDENT]), "fsdp2"]
        rows = speeds(measured, "homes", GPU.size, methods, GPU.tokens[:2], goal, memory, f", {memory or 'no cap'}")
        found += rows[2:] if memory else rows
    return found


# More than seven parameters: a table's rows and columns.
def speeds(measured, stage, size, methods, tokens, goals, memory=GPU.memory, suffix=""):
    """A table of methods, shown with a suffix, by tokens per step."""

    def speed(method, at):
        key = (method, size, "" if method == RESIDENT else memory, at)
        return cell(measured[stage], key, lambda row: stepped(measured, stage, row), last)

    last = last_day(measured)
    rows = [(method + suffix, *(speed(method, at) for at in tokens), goals.get(method, "")) for method in methods]
    return table(("method", *(f"{at:,} tokens per step" for at in tokens), "goal"), rows)


def stepped(measured, stage, row):
    """A row's speed, and what it is a share of."""
    parts = [
        f"{row['tokens_per_s']:,.0f} tokens/s",
        f"{row['step_s']:.3f} s ({row['step_s_least']:.3f} to {row['step_s_most']:.3f})",
    ]
    least = least_of(measured, row)
    if least is not None:
        parts.append(f"{least.seconds / row['step_s']:.0%} of the bound ({least.binding})")
    resident = measured[stage].get(RESIDENT, row["size"], "", row["tokens"])
    if resident is not None and row["method"] != RESIDENT and resident["machine"] == row["machine"]:
        parts.append(f"{row['tokens_per_s'] / resident['tokens_per_s']:.2f} of resident")
    if "exposed_share" in row:
        parts.append(f"{row['exposed_share']:.0%} exposed to the optimizer")
    if "boundaries" in row:
        parts.append(f"{len(row['boundaries'])} shards")
    if row.get("homed_layers"):
        parts.append(f"{row['homed_layers']} layers at home")
    if "device_peak_bytes" in row:
        parts.append(f"{gib(row['device_peak_bytes'])} GiB there, {gib(row['host_peak_bytes'])} here")
    return "; ".join(parts)


def least_of(measured, row):
    """The bound of a row of the engine; None with homes, or where what it is made of was not measured."""
    stage = "three" if row["size"] == GPU.larger_size else "one"
    rates, stream = (measured["facts"].get(name, "", "", 0) for name in ("ceilings", "stream"))
    kernels = measured[stage].get("kernels", row["size"], "", 0)
    is_spilled = "boundaries" in row and not row.get("homed_layers")
    if not is_spilled or any(
        each is None or each["machine"] != row["machine"] for each in (rates, stream, kernels)
    ):
        return None
    layers = [LayerSeconds(**layer) for layer in kernels["layers"]]
    return bound(
        compute_s(layers, row["boundaries"], row["graph_bytes"], row["micro_batches"]),
        {**rates, "dram_bytes_per_s": max(stream["dram_bytes_per_s"], rates["dram_bytes_per_s"])},
        num_parameters=row["num_parameters"],
        num_shards=len(row["boundaries"]),
        boundary_bytes=row["boundary_bytes"],
        moved=(row["loaded_bytes"], row["stored_bytes"]),
        num_tasks=row["num_tasks"],
    )


def four(measured):
    """Our round of several models, and each peer's time for them one after another."""
    tokens, last = GPU.tokens[:2], last_day(measured)
    ours = {at: measured["four"].get("interleaved", GPU.size, GPU.memory, at) for at in tokens}

    def our_round(row):
        return f"{row['num_tasks']} models: {stepped(measured, 'four', row)}"

    def peer(name, at):
        def after_another(row):
            own = ours[at]
            num = GPU.num_models if own is None else own["num_tasks"]
            text = f"{num * row['step_s']:.3f} s"
            is_alone = own is None or own["machine"] != row["machine"]
            return text if is_alone else f"{text}; ours takes {own['step_s'] / (num * row['step_s']):.2f} of it"

        return cell(measured["one"], (name, GPU.size, GPU.memory, at), after_another, last)

    goals = {
        name: f"ours at 8k at most {MOST_OF_EXACT:.2f} of the best exact one" for name in PEERS if PEERS[name].is_exact
    }
    goals[STALE] = f"ours at 8k at most {MOST_OF_STALE:.2f}"
    rows = [
        (
            "interleaved",
            *(cell(measured["four"], ("interleaved", GPU.size, GPU.memory, at), our_round, last) for at in tokens),
            f"of the bound at least {LEAST_OF_BOUND:.0%}",
        )
    ]
    rows += [
        (f"one after another: {name}", *(peer(name, at) for at in tokens), goals.get(name, ""))
        for name in ("engine", *PEERS)
        if name != RESIDENT
    ]
    return table(("method", *(f"{at:,} tokens per step" for at in tokens), "goal"), rows)


# Losses


def losses(measured):
    """The long run beside resident PyTorch, and each peer's first steps beside it."""
    at, steps = GPU.tokens[-1], GPU.num_loss_steps
    runs = [measured["loss"].get(name, GPU.size, GPU.memory, at) for name in LONG_RUNS]
    found = UNMEASURED
    if None not in runs:
        ours, resident = (run["losses"] for run in runs)
        every = range(0, steps, max(1, steps // 5))
        found = f"{difference(ours, resident):.2%}; ours {curve(ours, every)}; resident {curve(resident, every)}"
    rows = [(f"engine beside resident, {steps} steps", f"at most {MOST_LOSS:.0%}", found)]
    for name in ("engine", *PEERS):
        if name != RESIDENT:
            goal = f"at most {MOST_LOSS:.0%}" if name != STALE else ""
            rows.append((f"{name} beside resident, first steps", goal, first_losses(measured["one"], name)))
    return rows


def first_losses(results, name):
    """The largest difference after as many steps, at the longest step that has both."""
    for at in GPU.tokens:
        pair = [results.get(name, GPU.size, GPU.memory, at), results.get(RESIDENT, GPU.size, "", at)]
        if None not in pair and pair[0]["steps_before"] == pair[1]["steps_before"]:  # losses are of any machine
            return f"{difference(*(row['losses'] for row in pair)):.2%} at {at:,} tokens per step"
    return UNMEASURED


def curve(values, every):
    return ", ".join(f"{values[k]:.3f}" for k in [*every, len(values) - 1])
