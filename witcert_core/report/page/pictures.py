"""Pictures of a run as inline SVG. Shape says what colour says: a bar as high as the bound, a dot for certified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from witcert_core.report.page.run import Mark, Run
from witcert_core.report.text import number_up

SIZE = 16
_LEFT, _TOP = 34, 20
_WIDTH, _HEIGHT = 640, 200


def heat_map(run: Run) -> Markup:
    """Worst bound of every layer (down) and query head (across)."""
    heads = max(map(len, run.grid), default=0)
    width, height = _LEFT + heads * SIZE + 2, _TOP + len(run.grid) * SIZE + 2
    parts = [_open(width, height, f"Worst bound by layer and query head of {run.name}; a table follows")]
    every = 1 if heads <= 16 else 8
    for head in range(0, heads, every):
        parts.append(_text(_LEFT + head * SIZE + SIZE / 2, _TOP - 6, str(head), "middle"))
    for layer, row in enumerate(run.grid):
        y = _TOP + layer * SIZE
        if layer % (1 if len(run.grid) <= 32 else 4) == 0:
            parts.append(_text(_LEFT - 6, y + SIZE - 4, str(layer), "end"))
        for head, mark in enumerate(row):
            parts.extend(_cell(_LEFT + head * SIZE, y, mark, run.tau, f"layer {layer}, head {head}: {words(mark)}"))
    return Markup("".join([*parts, "</svg>"]))


def _cell(x: float, y: float, mark: Mark, tau: float, title: str) -> Iterator[str]:
    inner = SIZE - 2
    yield f'<g class="{kind(mark, tau)}"><title>{Markup.escape(title)}</title>'
    yield f'<rect class="back" x="{x + 1}" y="{y + 1}" width="{inner}" height="{inner}"/>'
    if mark is None:
        yield _text(x + SIZE / 2, y + SIZE - 4, "?", "middle")
    elif isinstance(mark, str):
        yield _text(x + SIZE / 2, y + SIZE - 4, "=", "middle")
    elif mark <= tau:
        yield f'<circle class="mark" cx="{x + SIZE / 2}" cy="{y + SIZE / 2}" r="2"/>'
    else:
        high = round(max(2.0, inner * mark), 1)
        yield f'<rect class="mark" x="{x + 1}" y="{round(y + 1 + inner - high, 1)}" width="{inner}" height="{high}"/>'
    yield "</g>"


def kind(mark: Mark, tau: float) -> str:
    """The class of a mark: unknown, exact, certified, above tau, or 1, which says nothing."""
    if mark is None or isinstance(mark, str):
        return "unknown" if mark is None else "exact"
    return "certified" if mark <= tau else "above" if mark < 1 else "nothing"


def words(mark: Mark) -> str:
    """A mark for people."""
    if mark is None or isinstance(mark, str):
        return "not measured, unknown" if mark is None else "read nothing quantized"
    return f"at most {number_up(mark, 3)}" if mark < 1 else "1, the bound says nothing"


def by_step(run: Run) -> Markup:
    """Largest bound, and what at least half of the cells are at most, by query row of a request."""
    steps, tau = run.steps, run.tau
    count = len(steps.bars)
    wide = (_WIDTH - _LEFT - 10) / max(count, 1)

    def place(number: int, value: float) -> str:
        return f"{_LEFT + number * wide:.1f},{_TOP + (1 - value) * _HEIGHT:.1f}"

    parts = [_open(_WIDTH, _TOP + _HEIGHT + 36, f"Bounds of {run.name} by step: the largest, and the middle one")]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + (1 - value) * _HEIGHT
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    y = _TOP + (1 - tau) * _HEIGHT
    parts.append(f'<line class="tau" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(_text(_WIDTH - 10, y - 4, "τ", "end"))
    for css, values in (
        ("largest", [steps.worst[i] if sum(steps.bars[i]) else None for i in range(count)]),
        ("middle", [steps.upper(i, 0.5) for i in range(count)]),
    ):
        for first, stretch in _stretches(values):
            points = [place(first + i + side, value) for i, value in enumerate(stretch) for side in (0, 1)]
            parts.append(f'<polyline class="{css}" points="{" ".join(points)}"/>')
    last = count * steps.width
    for number, anchor in ((1, "start"), (last, "end")):
        x = _LEFT if number == 1 else _WIDTH - 10
        parts.append(_text(x, _TOP + _HEIGHT + 18, f"step {number}", anchor))
    return Markup("".join([*parts, "</svg>"]))


def _stretches(values: Sequence[float | None]) -> Iterator[tuple[int, list[float]]]:
    """Values without a gap, and where they begin."""
    stretch: list[float] = []
    for place, value in enumerate([*values, None]):
        if value is not None:
            stretch.append(value)
        elif stretch:
            yield place - len(stretch), stretch
            stretch = []


def _open(width: float, height: float, label: str) -> str:
    return (
        f'<svg role="img" aria-label="{Markup.escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{Markup.escape(text)}</text>'
