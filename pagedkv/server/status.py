"""The status of the server: metrics for Prometheus, and a page with the pool."""

from __future__ import annotations

from collections.abc import Mapping

from .worker import Engine

# The page asks twice a second; the pool is drawn between two steps, so its blocks are of one instant.
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>pagedkv</title><link rel="icon" href="data:,">
<style>
  :root { color-scheme: light dark }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em }
  th { text-align: left; font-weight: normal; padding-right: 1em }
  svg { max-width: 100%; height: auto }
</style>
<h1>pagedkv</h1>
<p id="now">...</p>
<div id="pool"></div>
<script>
  async function draw() {
    try {
      const answer = await fetch("/status/pool");
      const {now, pool} = await answer.json();
      document.getElementById("now").textContent = now;
      document.getElementById("pool").innerHTML = pool;
    } catch { document.getElementById("now").textContent = "the server does not answer"; }
    setTimeout(draw, 500);
  }
  draw();
</script>
</html>
"""


def pool(engine: Engine) -> dict[str, str]:
    """Make what the page shows: a line of text, and the picture of the pool that notebooks show."""
    scheduler = engine.scheduler
    now = f"{scheduler.num_running} run, {scheduler.num_waiting} wait, {scheduler.num_preempted} preemptions"
    return {"now": now, "pool": engine.cache._repr_html_()}


def metrics(engine: Engine, counts: Mapping[str, int]) -> str:
    """Format the metrics as Prometheus' text format 0.0.4."""
    scheduler, stats = engine.scheduler, engine.cache.stats()
    ends = ("stop", "length", "aborted", "refused", "failed")
    families: list[tuple[str, str, str, dict[str, float]]] = [
        ("requests_total", "counter", "requests by how they ended", {f'end="{end}"': counts[end] for end in ends}),
        ("tokens_generated_total", "counter", "tokens that were sent", {"": counts["tokens"]}),
        ("prompt_tokens_total", "counter", "tokens of prompts looked up for a prefix", {"": stats.queried_tokens}),
        ("prefix_hit_tokens_total", "counter", "those found in the prefix cache", {"": stats.hit_tokens}),
        ("preemptions_total", "counter", "requests that gave their blocks back", {"": scheduler.num_preempted}),
        ("swaps_total", "counter", "those of them that were swapped out", {"": scheduler.num_swapped}),
        ("requests_running", "gauge", "requests that run", {"": scheduler.num_running}),
        ("requests_waiting", "gauge", "requests that wait", {"": scheduler.num_waiting}),
        (
            *("blocks", "gauge", "blocks of the pool; free ones include those that are cached"),
            {f'state="{state}"': getattr(stats, state) for state in ("used", "free", "shared", "cached")},
        ),
    ]
    groups = engine.cache.groups
    if len(groups) > 1:
        used = enumerate(zip(groups, stats.used_by_group, strict=True))
        by_group = {f'group="{g}",window="{group.window or "none"}"': blocks for g, (group, blocks) in used}
        families.append(("group_blocks", "gauge", "used blocks of each group of layers", by_group))
    if engine.cache.states:
        free = stats.num_states - stats.used_states - stats.cached_states
        slots = {"used": stats.used_states, "cached": stats.cached_states, "free": free}
        families += [
            ("states", "gauge", "slots of states", {f'state="{state}"': count for state, count in slots.items()}),
            (
                "prefix_tokens_without_state_total",
                "counter",
                "tokens whose blocks are cached, and no state for them",
                {"": stats.tokens_without_state},
            ),
        ]
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP pagedkv_{name} {text}", f"# TYPE pagedkv_{name} {kind}"]
        lines += [f"pagedkv_{name}{f'{{{label}}}' if label else ''} {value}" for label, value in values.items()]
    return "\n".join([*lines, ""])
