"""A page that shows each request as a bar over time: waiting for its first token, then its gaps by length."""

from collections.abc import Iterator, Sequence
from html import escape

from vllm_clone.benchmarks.serve.sample import Outcome

WIDTH, ROW, LEFT, TOP = 1100.0, 14, 60, 40
WAITING, COLOURS = "#9aa5b1", ("#2e9e5b", "#e0a800", "#d64545")
STYLE = "body{font:14px sans-serif;margin:24px;color:#222}svg text{font:11px sans-serif;fill:#444}"


def page(outcomes: Sequence[Outcome], limits: tuple[float, float]) -> str:
    """An HTML page with one SVG, without anything from elsewhere. ``limits`` are gaps in milliseconds."""
    done = sorted((o for o in outcomes if o.success), key=lambda o: o.start)
    begun = done[0].start if done else 0.0
    seconds = max((o.start + o.latency - begun for o in done), default=0.0) or 1.0
    height = TOP + ROW * len(done) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20:.0f}" height="{height}" role="img">',
        *_axis(seconds, height),
    ]
    for i, outcome in enumerate(done):
        parts += _bar(outcome, i, begun, WIDTH / seconds, limits)
    low, high = limits
    words = [
        (WAITING, "until the first token"), (COLOURS[0], f"gap below {low:g} ms"),
        (COLOURS[1], f"from {low:g} to {high:g} ms"), (COLOURS[2], f"{high:g} ms and more"),
    ]  # fmt: skip
    legend = " ".join(f'<span style="color:{colour}">&#9632;</span> {escape(text)}' for colour, text in words)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Requests over time</title><style>{STYLE}</style>"
        f"<h1>Requests over time</h1><p>{legend}</p>{''.join(parts)}</svg></html>\n"
    )


def _axis(seconds: float, height: int) -> Iterator[str]:
    for i in range(11):
        x = LEFT + WIDTH * i / 10
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 14}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 12}" text-anchor="middle">{seconds * i / 10:.3g} s</text>'


def _bar(outcome: Outcome, row: int, begun: float, scale: float, limits: tuple[float, float]) -> Iterator[str]:
    y = TOP + ROW * row
    x = LEFT + (outcome.start - begun) * scale
    title = (
        f"request {row}: {outcome.prompt_len} tokens in, {outcome.output_len} out, "
        f"first after {outcome.ttft * 1e3:.1f} ms, all after {outcome.latency * 1e3:.1f} ms"
    )
    yield f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{row}</text><g><title>{escape(title)}</title>'
    yield _box(x, y, outcome.ttft * scale, WAITING)
    x += outcome.ttft * scale
    for gap in outcome.gaps:
        colour = COLOURS[sum(gap * 1e3 >= limit for limit in limits)]
        yield _box(x, y, gap * scale, colour)
        x += gap * scale
    yield "</g>"


def _box(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" height="{ROW - 3}" fill="{colour}"/>'
