"""Tables in Markdown from the benchmarks' reports: what the scripts print, and what the README shows.

Nothing is computed here that is not in the report but percentages and rounding. A figure that is
missing is a dash.
"""
import statistics
import sys

DASH = "–"
NOT_MEASURED = "not measured on this commit"


def markdown(head, rows, text_columns=1):
    """The first columns are text, the rest figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def ms(figures):
    value = (figures or {}).get("ms", {}).get("median")
    if value is None:
        return DASH
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def ratio(figures, field="ratio", spread=False):
    """1.62, or 1.62 (1.60–1.63) with the 20th and 80th percentile of the blocks."""
    value = (figures or {}).get(field)
    if not value:
        return DASH
    text = f"{value['median']:.2f}"
    return text + f" ({value['p20']:.2f}–{value['p80']:.2f})" if spread else text


def served(products):
    """How many of the distinct products were served by an engine."""
    return f"{sum(p['replaced'] > 0 for p in products)} of {len(products)}" if products else DASH


def origin(report):
    """What, where and when: the line under a table."""
    machine, commit = report["machine"], (report["commit"] or "unknown")[:10]
    changed = " with uncommitted changes" if report["dirty"] else ""
    partial = "" if report["complete"] else "**The run did not end.** "
    policy = "" if report["policy"] == "default" else f", policy {report['policy']}"
    return (f"{partial}{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, cuBLAS "
            f"{machine['cublas']}, PyTorch {machine['torch']}; commit {commit}{changed}{policy}, "
            f"{report['date'][:10]}, `scripts/{report['script']}`: medians of "
            f"{report['effort']['blocks']} blocks, the sides in turns.")


# ---- one table each -----------------------------------------------------------------------------


def size_of(row):
    return f"{row['m']} × {row['k']} × {row['n']}" + (" forward" if row["forward"] else "")


def linear(report):
    peers = {c: None for row in report["results"] for c in row["columns"]}
    peers = [c for c in peers if c not in ("native", "qshim", "fp8", "ceiling")]
    head = ["tokens × in × out", "native, ms", "qshim", "in fp8", *peers, "GPU alone: qshim",
            "always fp8", "products only"]
    rows = []
    for row in report["results"]:
        get = row["columns"].get
        rows.append([size_of(row), ms(get("native")), ratio(get("qshim"), spread=True),
                     served(row["products"]), *(ratio(get(p)) for p in peers),
                     *(ratio(get(c), "gpu_ratio") for c in ("qshim", "fp8", "ceiling"))])
    return markdown(head, rows)


def lossless(report):
    """Under a policy that keeps bf16: nothing is in fp8, what is replaced is so by an algorithm."""
    head = ["tokens × in × out", "native, ms", "qshim", "GPU alone", "replaced"]
    return markdown(head, [[size_of(row), ms(row["columns"]["native"]),
                            ratio(row["columns"]["qshim"], spread=True),
                            ratio(row["columns"]["qshim"], "gpu_ratio", spread=True),
                            served(row["products"])] for row in report["results"]])


def sweep(report):
    """By either clock: how many sizes are below the limit, how the ratios spread, the worst of all.
    As called, the fastest blocks of both sides are compared (see bench_linear.py)."""
    rows, lines = [r for r in report["results"] if "ms" in r["columns"]["qshim"]], []
    acted = [any(p["replaced"] for p in row["products"]) for row in rows]
    again = sum("pairs" in row for row in rows)
    lines.append(f"{len(rows)} sizes of a forward product, {sum(acted)} of them in fp8"
                 + (f"; {again} were measured in several pairs of processes." if again else "."))
    body = []
    for name, value in (("GPU alone", lambda q: q["gpu_ratio"]["median"]),
                        ("As called", as_called)):
        def of(row):
            return value(row["columns"]["qshim"])
        limit = report.get("limit", 0)
        below = [a for r, a in zip(rows, acted) if of(r) < limit]
        lines.append(f"{name}: {len(below) or 'none'} below {limit}"
                     + (f", {sum(below) or 'none'} of them in fp8" if below else "")
                     + spread_of([of(r) for r, a in zip(rows, acted) if not a]))
        for row in sorted(rows, key=of)[:3]:
            figures = row["columns"]["qshim"]
            body.append([size_of(row).removesuffix(" forward"), name,
                         ms(row["columns"]["native"]), ratio(figures, "gpu_ratio", spread=True),
                         fastest(figures), ratio(figures, spread=True),
                         served(row["products"])])
    head = ["tokens × in × out", "least", "native, ms", "GPU alone", "as called, fastest blocks",
            "as called, medians", "in fp8"]
    return "\n".join(lines) + "\n\n" + markdown(head, body, text_columns=2)


def as_called(figures):
    """What a size is judged by: the fastest blocks, in reports that are older the medians."""
    return figures.get("least_ratio", figures["ratio"]["median"])


def fastest(figures):
    return f"{figures['least_ratio']:.2f}" if "least_ratio" in figures else DASH


def spread_of(values):
    """Of the sizes that qshim leaves alone: what is not 1 there is noise, or the price of looking."""
    if len(values) < 2:
        return "."
    low, middle, high = statistics.quantiles(values, n=4)
    return f"; where nothing is replaced {middle:.2f}, half of these {low:.2f}–{high:.2f}."


def layer(report):
    head = ["ms", "native", "qshim", "ratio", "always fp8", "products only", "ratio"]
    rows = []
    for case in report["results"]:
        for name, group in case["groups"].items():
            title = name if name != "layer" else \
                f"all twelve ({case['tokens']} tokens, {case['hidden']}, {case['ffn']})"
            rows.append([title, ms(group["native"]), ms(group["qshim"]), ratio(group["qshim"]),
                         ms(group["fp8"]), ms(group["ceiling"]), ratio(group["ceiling"])])
    return markdown(head, rows)


def rate(figures):
    return f"{figures['tokens_per_s']:,.0f}" if "tokens_per_s" in figures else DASH


def of_gain(value, ceiling):
    """Ratio reached over the ratio possible."""
    return f"{100 * value['median'] / ceiling:.0f} %" if value and ceiling else DASH


def llama(report):
    head = ["model", "", "native, tokens/s", "qshim, tokens/s", "ratio", "share of products",
            "possible", "of possible", "loss, fourth step"]
    rows = []
    for case in report["results"]:
        for kind, title in (("train", "training step"), ("prefill", "prefill")):
            part = case[kind]
            native, qshim = part["columns"]["native"], part["columns"]["qshim"]
            possible = part.get("ceiling")
            # from the fifth step on the batches are known by heart and the loss says little
            losses = [(case["losses"][s][:4] or [None])[-1] for s in ("native", "qshim")]
            loss = " / ".join(f"{x:.4f}" for x in losses) if None not in losses else DASH
            rows.append([case["title"], title, rate(native), rate(qshim),
                         ratio(qshim, spread=True),
                         f"{possible['share']:.2f}" if possible else DASH,
                         f"{possible['ratio']:.2f}" if possible else DASH,
                         of_gain(qshim.get("ratio"), possible and possible["ratio"]),
                         loss if kind == "train" else DASH])
    return markdown(head, rows, text_columns=2)


def around(value, sign=""):
    """6.97 (6.74–7.50): the median with the 20th and 80th percentile."""
    return f"{value['median']:{sign}.2f} ({value['p20']:.2f}–{value['p80']:.2f})"


def host(report):
    """Microseconds of the calling thread: a call of each side, and how many more than natively."""
    sides = list(report["results"][0]["columns"])
    head = ["µs of the CPU", "native", *sides[1:]]
    rows = [[f"`{row['entry']}`", around(row["columns"]["native"]["us"]),
             *(around(row["columns"][s]["more"], "+") for s in sides[1:])]
            for row in report["results"]]
    return markdown(head, rows)


def launch(report):
    """Microseconds of the calling thread, by operation and by how many weights are watched."""
    head = ["µs of the CPU a launch", "weights", "of them kept", "native", "qshim", "difference"]
    rows = []
    for row in report["results"]:
        native, qshim = row["columns"]["native"], row["columns"]["qshim"]
        rows.append([f"`{row['operation']}`", str(row["weights"]), str(row["kept"]),
                     around(native["us"]), around(qshim["us"]), around(qshim["more"], "+")])
    return markdown(head, rows)


# Steps of the quantising kernels that a call usually pays, by form of the operand.
USUAL = {"straight": "cast", "turned": "cast", "both": "cast", "rows": "cast", "columns": "all"}


def quantize(report):
    """Percent of the copy's rate, a row for each size."""
    copy = next(r["gb_s"] for r in report["results"] if r["step"] == "copy")
    found = {(r["inner"], r["outer"], r["form"]): 100 * r["gb_s"] / copy for r in report["results"]
             if r["step"] == USUAL.get(r["form"])}
    sizes = list(dict.fromkeys((inner, outer) for inner, outer, _ in found))
    head = [f"% of a copy's {copy:.0f} GB/s", *USUAL]
    rows = [[f"{outer} × {inner}", *(f"{found[inner, outer, form]:.0f}" for form in USUAL)]
            for inner, outer in sizes]
    return markdown(head, rows)


def us(figures):
    value = (figures or {}).get("ms", {}).get("median")
    return f"{1000 * value:.1f}" if value else DASH


def mib(size):
    return f"{size / 2**20:.1f}" if size is not None else DASH


def served_share(products):
    """Of the calls between two readings, those that an engine served."""
    calls = sum(p["calls"] for p in products)
    return f"{100 * sum(p['replaced'] for p in products) / calls:.0f} %" if calls else DASH


def nf4(report):
    """Microseconds natively, ratios of the others; memory for one layer."""
    labels = [label for label in report["results"][0]["memory"] if label != "native"]
    titles = {"nf4": "NF4", "fp8": "frozen fp8", "auto": "default policy"}
    head = ["tokens", "hidden", "native, µs", "NF4, µs", "NF4 calls served",
            *(titles.get(label, label) for label in labels), "eager: native, µs",
            *(titles.get(label, label) for label in labels), "MiB: native",
            *(titles.get(label, label) for label in labels)]
    rows = []
    for row in report["results"]:
        graph, eager = row["graph"].get, row["eager"].get
        rows.append([str(row["tokens"]), str(row["hidden"]), us(graph("native")), us(graph("nf4")),
                     served_share(row["served"]["nf4"]),
                     *(ratio(graph(label), spread=label == "nf4") for label in labels),
                     us(eager("native")), *(ratio(eager(label)) for label in labels),
                     *(mib(row["memory"].get(label)) for label in ["native", *labels])])
    absent = f" Not installed: {', '.join(report['absent'])}." if report.get("absent") else ""
    return ("Times a call of a replayed graph, then launched eagerly; ratios to native, above 1 is "
            f"faster; memory of a layer without its input.{absent}\n\n" + markdown(head, rows, 2))


def nf4_progress(row):
    get = row["graph"].get
    print(f"{row['tokens']} x {row['hidden']}: {us(get('native'))} us, NF4 x{ratio(get('nf4'))}, "
          f"frozen fp8 x{ratio(get('fp8'))}, default policy x{ratio(get('auto'))} "
          f"({served_share(row['served']['auto'])} served)", file=sys.stderr)


DECODE_KINDS = {"graph": "CUDA graph", "products": "its products alone",
                "lean": "lean decoder, CUDA graph", "generate": "eager generate()"}


def gib(kept):
    return f"{sum(size for size, _ in kept.values()) / 2**30:.1f} GiB"


def decode(report):
    head = ["batch", "", "native, ms a token", "NF4", "ratio", "frozen fp8", "ratio"]
    rows = []
    for row in report["results"]:
        for kind, part in row["kinds"].items():
            native, fp4, fp8 = (part["columns"].get(side) for side in ("native", "nf4", "fp8"))
            rows.append([str(row["batch"]), DECODE_KINDS[kind], ms(native), ms(fp4),
                         ratio(fp4, spread=True), ms(fp8), ratio(fp8, spread=True)])
    kept = report["results"][-1]["kept"]
    below = "".join(f" batch {batch} {side} {value:.2f}," for batch, side, value
                    in report.get("below", [])).rstrip(",")
    return (f"Llama, {report['results'][0]['model']}, cache of {report['results'][0]['context']} "
            f"positions. Kept beside the bf16 weights: NF4 {gib(kept['nf4'])}, fp8 "
            f"{gib(kept['fp8'])}. Eager generate() below {report.get('limit', DASH)}:"
            f"{below or ' none'}.\n\n" + markdown(head, rows, 2))


def programs(report):
    head = ["program", "native, ms a step", "another native process", "default policy",
            "best by hand", "default over best",
            f"largest loss difference, {report['steps']} steps", "of two native runs"]
    rows = []

    def difference(value):
        return DASH if value is None else f"{value:.4f}"

    for row in report["results"]:
        qshim = row["columns"]["qshim"]
        name, best = row["best"]
        rows.append([row["program"], ms(row["columns"]["native"]),
                     ratio(row["columns"].get("again", {}), spread=True), ratio(qshim, spread=True),
                     f"{best:.2f} ({name})" if best else DASH,
                     f"{qshim['ratio']['median'] / best:.2f}" if best and "ratio" in qshim else DASH,
                     difference(row.get("difference")), difference(row.get("control"))])
    return markdown(head, rows)


TABLES = {"linear": linear, "lossless": lossless, "sweep": sweep, "layer": layer, "llama": llama,
          "nf4": nf4, "decode": decode, "programs": programs, "host": host,
          "launch": launch, "quantize": quantize}


def table(name, report):
    return f"{TABLES[name](report)}\n\n{origin(report)}"


def progress(row):
    """One case of a long run, on stderr: stdout is for the table."""
    columns = row["columns"]
    print(f"{size_of(row)}: {ms(columns['native'])} ms, x{ratio(columns['qshim'])}", file=sys.stderr)


# ---- the README's first table -------------------------------------------------------------------


def layer_lines(report):
    for case in report["results"]:
        group = case["groups"]["layer"]
        yield [f"products of a transformer layer, forward and backward ({case['tokens']} tokens, "
               f"{case['hidden']}, {case['ffn']})", f"{ms(group['native'])} ms",
               f"{ms(group['qshim'])} ms", ratio(group["qshim"])]


def llama_lines(report):
    for case in report["results"]:
        for kind, title in (("train", "training step"), ("prefill", "prefill")):
            native, qshim = (case[kind]["columns"][s] for s in ("native", "qshim"))
            yield [f"Llama, {case['title']}: {title}", f"{rate(native)} tokens/s",
                   f"{rate(qshim)} tokens/s", ratio(qshim)]


def decode_lines(report):
    for row in report["results"]:
        columns = row["kinds"]["graph"]["columns"]
        native, kept = columns["native"], columns["nf4"]
        yield [f"Llama, {row['model']}: decoding a token, batch {row['batch']}, CUDA graph, NF4",
               f"{ms(native)} ms", f"{ms(kept)} ms", ratio(kept)]


def headline(reports):
    """The rows that say most, of those reports that are there; `reports`: name -> report or None."""
    makers = {"llama": llama_lines, "decode": decode_lines, "layer": layer_lines}
    rows = [line for name, lines in makers.items() if reports.get(name)
            for line in lines(reports[name])]
    if not rows:
        return NOT_MEASURED
    machine = next(r for name, r in reports.items() if r and name in makers)["machine"]
    return markdown([machine["gpu"], "without", "with qshim", "ratio"], rows)
