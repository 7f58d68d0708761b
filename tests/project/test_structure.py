"""Imports go one way, down the map of CONTRIBUTING.md; those for types and those in functions count, too."""

import ast
import functools
import graphlib
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import pagedkv

PACKAGE = Path(pagedkv.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


# -- what is imported
def import_statements(node):
    """Import statements below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.expr):  # which hold no statements
            yield from import_statements(child)


def imports(text, package):
    """(module, name) of everything that a text in `package` imports; the name is "" for ``import module``."""
    for statement in import_statements(ast.parse(text)):
        if isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names)
        else:
            parents = package.split(".")
            base = parents[: len(parents) + 1 - statement.level] if statement.level else []
            module = ".".join([*base, statement.module] if statement.module else base)
            yield from ((module, alias.name) for alias in statement.names)


def import_graph(root):
    """By the dotted name of each module below `root`, the modules that it imports; of other packages, names too."""
    paths = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {module: set() for module in paths}
    for module, path in paths.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        for imported, name in imports(path.read_text(), package):
            member = f"{imported}.{name}" if name else imported
            graph[module].add(imported if imported in paths and member not in paths else member)
    return graph


def circle(graph):
    """Nodes along a circle, the first one again at the end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def rooms_within(graph, package):
    """The graph of what stands directly in a package: its modules, and its folders with all that is in them."""

    def room(module):
        return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else None

    rooms = {}
    for module, imported in graph.items():
        if own := room(module):
            rooms.setdefault(own, set()).update({room(x) for x in imported if x in graph} - {None, own})
    return rooms


@functools.cache
def ours_as_graph():
    """The import graph of the package: made by the process that runs these tests, not by each that collects them."""
    return import_graph(PACKAGE)


TOP = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__", "__pycache__"}


# -- what may be imported
def within(module, rooms):
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


class Rule(NamedTuple):
    """What modules of `rooms` import from those of `among` is in the `allowed` ones."""

    rooms: tuple[str, ...]
    among: tuple[str, ...]
    allowed: tuple[str, ...]

    def breaches(self, graph):
        return [
            f"{module} imports {imported}"
            for module in sorted(graph)
            if within(module, self.rooms)
            for imported in sorted(graph[module])
            if within(imported, self.among) and not within(imported, self.allowed)
        ]


def ours(*rooms):
    return tuple(f"pagedkv.{room}" for room in rooms)


BACKENDS = ("cpu", "cuda", "emulator")
WITHOUT_NUMBA = {path.stem for path in PACKAGE.glob("kernels/device/*")} - {"language", "__init__", "__pycache__"}
OF_KERNELS = ("device", "paged", "split", "prefill", "blocks", "merge_states", "rotary", "read")
SIDE_BY_SIDE = (("cuda_cores", "tensor_cores"), ("tensor_cores.parts", "tensor_cores.wgmma"))  # in kernels/prefill
OF_THE_EMULATOR = ("errors", "ptx", "translation", "state", "machine", "device")  # from the ground up
RULES = {
    **{
        f"kernels/{x} shares kernels/device": Rule(
            ours(f"kernels.{x}"), ours("kernels"), ours("kernels.device", f"kernels.{x}")
        )
        for x in OF_KERNELS
    },
    **{
        f"kernels/prefill/{x} shares what is above it and {y}": Rule(
            ours(f"kernels.prefill.{x}"), ours(f"kernels.prefill.{y}"), ()
        )
        for pair in SIDE_BY_SIDE
        for x, y in (pair, pair[::-1])
    },
    **{f"{x} knows no other backend": Rule(ours(x), ours(*BACKENDS), ours(x)) for x in ("cpu", "cuda")},
    "of all other rooms, the emulator knows what compiles users' kernels": Rule(
        ours("emulator"), ours(*TOP - {"emulator"}), ours("compiler.own_kernels", "cached_property")
    ),
    "in the emulator, run alone compiles": Rule(
        ours(*(f"emulator.{x}" for x in OF_THE_EMULATOR)), ours(*TOP - {"emulator"}), ours("cached_property")
    ),
    **{
        f"emulator/{x} knows what is below": Rule(
            ours(f"emulator.{x}"), ours("emulator"), ours(*(f"emulator.{y}" for y in OF_THE_EMULATOR[: i + 1]))
        )
        for i, x in enumerate(OF_THE_EMULATOR)
    },
    "a backend gets a valid call and checks nothing": Rule(
        ours("cpu", "cuda.backend", "cuda.plans", "emulator"), ours("validation", "operations"), ()
    ),
    "validation knows no backend": Rule(ours("validation"), ours(*BACKENDS, "backends"), ()),
    "the scheduler computes nothing": Rule(ours("scheduling"), ours("operations", "kernels", *BACKENDS), ()),
    "transformers is for its integration, and for what loads models": Rule(
        ours(*TOP - {"integrations", "bench", "server"}), ("transformers",), ()
    ),
    "kernels are device code": Rule(ours("kernels"), ours(*TOP - {"kernels"}), ()),
    "the compiler knows kernels, and what keeps them": Rule(
        ours("compiler"),
        ours(*TOP - {"compiler"}),
        ours("kernels", "kernel_cache", "score_mod", "environment", "errors", "extras"),
    ),
    "no property has a lock that a fork could leave locked": Rule(ours(*TOP), ("functools.cached_property",), ()),
    "reference stands alone": Rule(ours("reference"), ours(*TOP - {"reference"}), ours("typing")),
    "no backend looks at reference": Rule(ours(*BACKENDS, "kernels"), ours("reference"), ()),
    "trace knows no operation and no backend": Rule(
        ours("trace"),
        ours(*TOP - {"trace"}),
        ours("memory", "drawing", "errors", "layer_states", "layer_windows", "layouts", "typing"),
    ),
    "drawing takes arrays": Rule(ours("drawing"), ours(*TOP - {"drawing"}), ours("errors")),
    "the testing kit asks backends by their operations": Rule(
        ours("testing"), ours(*BACKENDS, "kernels", "bench", "validation"), ours("cpu.threads", "emulator")
    ),
    "what is drawn calls nothing": Rule(ours("testing.problems"), ours(*TOP), ours("testing.problems", "layouts")),
    "bench/cpu needs no GPU": Rule(ours("bench.cpu"), ours("bench.gpu", "cuda", "kernels"), ()),
    "kernels are written in what device/language.py imports": Rule(
        ours(*(f"kernels.{x}" for x in OF_KERNELS if x != "device"), *(f"kernels.device.{x}" for x in WITHOUT_NUMBA)),
        ("numba",),
        (),
    ),
    # A move to the successor of numba-cuda touches nothing else.
    "numba-cuda is for the compiler and kernels": Rule(ours(*TOP - {"compiler", "kernels"}), ("numba.cuda",), ()),
    "cuda-core is for cuda and the compiler, and for arrays that speak DLPack": Rule(
        ours(*TOP - {"cuda", "compiler", "arrays"}), ("cuda",), ()
    ),
}
over_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def layers(text):
    """The rooms of the map in CONTRIBUTING.md, from the top down; lines further in say what is in them."""
    return re.findall(r"^([a-z_]+)(?:/|\.py)", re.search(r"```text\n(.*?)```", text, re.DOTALL)[1], re.MULTILINE)


def test_no_modules_import_each_other_in_a_circle():
    found = circle(ours_as_graph())
    assert not found, " imports ".join(found)


def test_no_rooms_import_each_other_in_a_circle():
    graph = ours_as_graph()
    for package in {module.rpartition(".")[0] for module in graph} - {""}:
        found = circle(rooms_within(graph, package))
        assert not found, f"in {package}, {' imports '.join(found)}"


def test_rooms_import_what_the_map_has_below_them():
    order = layers(CONTRIBUTING.read_text())
    assert sorted(order) == sorted(TOP - {"__main__"})
    up = [
        f"{room} imports {imported}"
        for room, imports in rooms_within(ours_as_graph(), "pagedkv").items()
        for imported in imports
        if room != "__main__" and order.index(imported) < order.index(room)
    ]
    assert not up


@over_rules
def test_modules_import_what_they_may(rule):
    assert not rule.breaches(ours_as_graph())


# -- the tests above can fail
@over_rules
def test_a_made_up_import_breaks_the_rule(rule):
    for module in ours_as_graph():
        if within(module, rule.rooms):
            for room in rule.among:
                wrong = f"{room}.made_up"
                expected = [] if within(wrong, rule.allowed) else [f"{module} imports {wrong}"]
                assert rule.breaches({module: {"numpy", wrong}}) == expected


@over_rules
def test_rules_are_about_rooms_that_are_there(rule):
    for room in (*rule.rooms, *rule.among, *rule.allowed):
        assert not within(room, ["pagedkv"]) or any(within(module, [room]) for module in ours_as_graph()), room


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b", "c"}, "b": {"c", "numpy"}, "c": set()}, set()),
        ({"a": {"a"}}, {"a"}),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, {"b", "c"}),
        ({"a": {"b"}, "b": {"c"}, "c": {"d", "a"}, "d": {"numpy"}}, {"a", "b", "c"}),
    ],
)
def test_circles_are_found(graph, found):
    path = circle(graph)
    assert set(path) == found
    assert all(after in graph[before] for before, after in pairwise(path))


def test_imports_are_found_wherever_they_stand():
    text = """
import numpy as np, pagedkv.operations.attention
from . import sibling
from .sibling import name
from ...layouts import LAYOUTS, cache_spec
if TYPE_CHECKING:
    from .types import alone
else:
    from .run import time
class A:
    def method(self):
        if self:
            from .. import late
"""
    assert list(imports(text, "pagedkv.cuda.plans")) == [
        ("numpy", ""),
        ("pagedkv.operations.attention", ""),
        ("pagedkv.cuda.plans", "sibling"),
        ("pagedkv.cuda.plans.sibling", "name"),
        ("pagedkv.layouts", "LAYOUTS"),
        ("pagedkv.layouts", "cache_spec"),
        ("pagedkv.cuda.plans.types", "alone"),
        ("pagedkv.cuda.plans.run", "time"),
        ("pagedkv.cuda", "late"),
    ]


def test_rooms_are_modules_and_folders_with_all_that_is_in_them():
    graph = {"p": {"p.a.b"}, "p.a": {"p"}, "p.a.b": {"p.a.c", "p.d", "numpy"}, "p.a.c": set(), "p.d": {"p.a.c"}}
    assert rooms_within(graph, "p") == {"a": {"d"}, "d": {"a"}}
    assert rooms_within(graph, "p.a") == {"b": {"c"}, "c": set()}


def test_the_map_is_read_from_the_top_down():
    assert layers("# a\n```text\nb/   c.py too\n  d/  e/\n     f.py\ng.py\n```\nh/\n```text\ni/\n```") == ["b", "g"]


def test_modules_and_names_are_told_apart(tmp_path):
    for path, text in {
        "p/__init__.py": "from .room.a import f",
        "p/room/__init__.py": "VALUE = 1",
        "p/room/a.py": "from . import b, VALUE\nfrom .b import g\nfrom numba import cuda\nimport numpy.linalg",
        "p/room/b.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert import_graph(tmp_path / "p") == {
        "p": {"p.room.a"},
        "p.room": set(),
        "p.room.a": {"p.room.b", "p.room", "numba.cuda", "numpy.linalg"},
        "p.room.b": set(),
    }
