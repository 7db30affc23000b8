"""The demonstration's screen: one panel per server, drawn with rich from a Tally and nothing else."""

from __future__ import annotations

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from witcert_core.report.text import percent_down
from witcert_demo.chat import ChatQuestion
from witcert_demo.tally import Asked, Tally
from witcert_demo.texts import texts_table

TAIL_WORDS = 2
MARKS = {"green": "·", "yellow": "▒", "red": "█", "dim": "?"}
"""What a cell of the map looks like, by its colour."""


def colour(bound: float | None, tau: float) -> str:
    """Green up to tau, yellow while the bound still says something, red when it is vacuous."""
    if bound is None:
        return "dim"
    return "green" if bound <= tau else "yellow" if bound < 1 else "red"


def heads_table(tally: Tally) -> Table:
    """Worst bound of every (layer, query head)."""
    table = Table(title="worst bound, layer x head", box=box.SIMPLE_HEAD, title_style="bold", padding=(0, 1))
    table.add_column("layer", justify="right")
    for head in range(len(tally.by_layer_head[0]) if tally.by_layer_head else 0):
        table.add_column(f"h{head}", justify="right")
    for layer, row in enumerate(tally.by_layer_head):
        cells = [Text("unknown" if b is None else f"{b:.3f}", style=colour(b, tally.tau)) for b in row]
        table.add_row(str(layer), *cells)
    return table


def heads_map(tally: Tally) -> Text:
    """The same for models of many layers: a character for each, layers from left to right, heads from top to bottom."""
    layers = tally.by_layer_head
    text = Text(f"worst bound of {len(layers)} layers (across) x {len(layers[0]) if layers else 0} heads\n", "bold")
    for row in zip(*layers, strict=True):
        for style in (colour(bound, tally.tau) for bound in row):
            text.append(MARKS[style], style)
        text.append("\n")
    legend = {"green": f"certified at {tally.tau:g}", "yellow": "below 1", "red": "1: no guarantee"}
    for style, meaning in legend.items():
        text.append(f"{MARKS[style]} ", style).append(f"{meaning}  ", "dim")
    return text


def answers_table(tally: Tally, exact: Tally) -> Table:
    """The latest answers beside the 16-bit ones."""
    table = Table(title="answers", box=box.SIMPLE_HEAD, title_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True, min_width=5)
    table.add_column("task", no_wrap=True, min_width=17)
    table.add_column("asked", no_wrap=True, min_width=13)
    table.add_column("16-bit cache", no_wrap=True, max_width=34)
    table.add_column(tally.name, no_wrap=True, max_width=34)
    for index, item in list(enumerate(tally.asked))[-6:]:
        assert not isinstance(item.sample, ChatQuestion)
        table.add_row(
            Text("right", style="green") if item.right else Text("wrong", style="bold red"),
            item.sample.task.replace("_", " "),
            "... " + " ".join(item.sample.prompt.split()[-TAIL_WORDS:]),
            answer_text(exact.asked[index]) if index < len(exact.asked) else "",
            answer_text(item),
        )
    return table


def answer_text(item: Asked) -> Text:
    return Text(item.answer or "(nothing)", style="" if item.right else "red", overflow="ellipsis")


def certified(tally: Tally) -> str:
    """Share of cells within tau; under the dither law both tiers, since only one of them covers generated text."""
    share, any_query = tally.certified_share, tally.any_query_share
    if share is None or any_query is None:
        return "nothing quantized was read" if tally.exact else "unknown"
    if tally.tier == "deterministic":
        return f"{percent_down(share)} of {tally.measured} cells (deterministic: any query)"
    return (
        f"{percent_down(any_query)} of {tally.measured} cells (deterministic: any query), "
        f"{percent_down(share)} with probability 0.99 "
        "(probabilistic: texts fixed before the cached prefix was written)"
    )


def figures(tally: Tally) -> Table:
    """The totals so far."""
    table = Table.grid(padding=(0, 2))
    share = tally.certified_share
    forms = ", ".join(f"{name} {count}" for name, count in tally.forms.most_common())
    rows = [
        (f"certified at {tally.tau:g}", certified(tally)),
        ("worst bound", "unknown" if share is None else f"{tally.worst:.3f}"),
        ("not measured", f"{tally.unknown} cells"),
        ("form that decided", forms or "none"),
        ("audit", f"{tally.audited} cells compared with exact attention, {tally.violations} violations"),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="bold"), value)
    return table


def panel(tally: Tally, exact: Tally, total: int) -> Panel:
    """Everything about one server."""
    parts: list[RenderableType]
    if chats(tally):
        beside = Table.grid(padding=(0, 3))
        beside.add_row(heads_map(tally), figures(tally))
        parts = [beside, texts_table(tally, exact)]
    else:
        parts = [Columns([heads_table(tally), answers_table(tally, exact)], padding=(0, 2)), figures(tally)]
    if len(tally.asked) == total:
        parts.append(Text(tally.sentence(exact), style="bold"))
    style = "green" if tally.certified_share == 1.0 else "yellow" if tally.right == exact.right else "red"
    title = f"[bold]{tally.name}[/bold]  {len(tally.asked)} of {total} questions, {outcome(tally)}"
    return Panel(Group(*parts), title=title, title_align="left", border_style=style)


def chats(tally: Tally) -> bool:
    """Whether a chat model is asked, whose texts are shown."""
    return bool(tally.asked) and isinstance(tally.asked[0].sample, ChatQuestion)


def outcome(tally: Tally) -> str:
    """How many of the answers that can be right are."""
    return f"{tally.right} of {tally.scored} {'hidden facts found' if chats(tally) else 'answers right'}"


def overview(tallies: list[Tally], exact: Tally) -> Table:
    """One line a quantizer, for the end."""
    table = Table(title="What the meter saw, and what the answers say", box=box.ROUNDED, title_style="bold")
    table.caption = (
        "A cell is one query row of one layer and head. Certified: its attention weights moved by at most "
        f"{tallies[0].tau:g}, for any query (deterministic tier) or under the law of the dither (probabilistic tier)."
    )
    texts = chats(exact)
    columns = (
        "KV cache",
        "hidden facts found" if texts else "answers right",
        *(("texts unchanged",) if texts else ()),
        "certified, any query",
        "probabilistic tier",
        "worst bound",
        "violations",
    )
    for column in columns:
        name = column == "KV cache"
        table.add_column(column, justify="left" if name else "right", no_wrap=name)
    table.add_row("16 bit, no meter", f"{exact.right} of {exact.scored}")
    for tally in tallies:
        share = tally.certified_share
        table.add_row(
            tally.name,
            f"{tally.right} of {tally.scored}",
            *((f"{len(tally.asked) - tally.changed(exact)} of {len(tally.asked)}",) if texts else ()),
            "unknown" if tally.any_query_share is None else percent_down(tally.any_query_share),
            "" if tally.tier == "deterministic" or share is None else percent_down(share),
            f"{tally.worst:.3f}",
            Text(
                f"{tally.violations} of {tally.audited}",
                style="green" if tally.violations == 0 else "bold red",
            ),
        )
    return table
