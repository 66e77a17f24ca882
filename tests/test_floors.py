"""Who may import whom: a file imports only from lower floors, read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"fuser": ROOT / "fuser", "fuser.patterns": ROOT / "patterns", "fuser.codegen": ROOT / "codegen"}

# The longest prefix of a module's name decides its floor.
FLOORS = {
    "fuser.torch_private": 0,
    "fuser.scalar": 0,
    "fuser.operators": 0,
    "fuser.fused": 0,
    "fuser.state": 0,
    "fuser.program": 1,
    "fuser.report": 2,
    "fuser.capture": 2,
    "fuser.patterns": 2,
    "fuser.passes": 3,
    "fuser.codegen": 4,
    "fuser.runtime": 5,
    "fuser.pipeline": 6,
    "fuser.differentiable": 7,
    "fuser.optimized": 8,
    "fuser.ops": 9,
    "fuser.flat": 0,
    "fuser.autodiff": 9,
    "fuser.inspect": 7,
    "fuser.doctor": 7,
    "fuser.dynamo": 9,
    "fuser.cli": 9,
    "fuser.__main__": 10,
    "fuser.examples": 10,
    "fuser.__init__": 10,
}
# Neighbours that must not know each other.
STRANGERS = [
    ("fuser.patterns", "fuser.codegen"),
    ("fuser.codegen", "fuser.patterns"),
    ("fuser.capture", "fuser.patterns"),
    ("fuser.capture", "fuser.report"),
    ("fuser.report", "fuser.capture"),
    ("fuser.report", "fuser.patterns"),
    ("fuser.patterns", "fuser.capture"),
    ("fuser.patterns", "fuser.report"),
    ("fuser.codegen", "fuser.capture"),
    ("fuser.codegen", "fuser.report"),
    ("fuser.passes", "fuser.capture"),
    ("fuser.passes", "fuser.report"),
]


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts])
            found[name if name == "fuser.__init__" else name.removesuffix(".__init__")] = path
    return found


def floor(name: str) -> tuple[str, int]:
    """The prefix that decides, and its floor."""
    while name and name not in FLOORS:
        name = name.rpartition(".")[0]
    if not name:
        return "", -1
    return name, FLOORS[name]


def imports(path: Path) -> set[str]:
    """Every `fuser` module that the file imports, inside functions too, except for type checking alone."""
    tree = ast.parse(path.read_text())
    branches = [b for b in ast.walk(tree) if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test)]
    ignored = {id(n) for branch in branches for n in ast.walk(branch)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    known = set(modules())
    return {name for name in found if name in known and name != "fuser"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_only_from_lower_floors(name: str) -> None:
    group, own = floor(name)
    assert own >= 0, f"{name} has no floor: give it one in FLOORS"
    for imported in imports(modules()[name]):
        other_group, other = floor(imported)
        assert other >= 0, f"{imported} has no floor"
        assert other < own or (group == other_group), f"{name} (floor {own}) imports {imported} (floor {other})"
        assert (group, other_group) not in STRANGERS, f"{name} must not know {imported}"


def test_the_walk_sees_what_it_should() -> None:
    seen = imports(ROOT / "fuser" / "pipeline.py")
    assert "fuser.codegen.lowering" in seen and "fuser.capture" in seen


def test_importing_fuser_loads_nothing() -> None:
    assert imports(ROOT / "fuser" / "__init__.py") == set()
