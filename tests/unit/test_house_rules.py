"""The hard limits of CONTRIBUTING.md on the size and shape of code, so that nobody has to argue about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "services", "gateway", "bench")
KERNELS = ("*.cpp", "*.cu", "*.h")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4  # blocks inside blocks of one function; the aim is three

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


def sources(*patterns: str) -> list[Path]:
    found = [path for package in PACKAGES for pattern in patterns for path in (ROOT / package).rglob(pattern)]
    assert found
    return sorted(found)


def functions() -> Iterator[tuple[str, Function]]:
    for path in sources("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def code_lines(function: Function) -> int:
    """Lines from ``def`` to the end, without the docstring: documenting well must not cost."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    head = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (head.end_lineno or head.lineno) - head.lineno + 1
    return lines


def nesting(node: ast.AST, *, is_elif: bool = False) -> int:
    """The deepest stack of blocks; ``elif`` stays on its ``if``'s level, a nested function counts for itself."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, is_elif=chained))
    return deepest + (isinstance(node, BLOCKS) and not is_elif)


def test_a_file_fits_a_reader() -> None:
    files = [*sources("*.py", *KERNELS), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_a_function_fits_a_screen() -> None:
    long = {name: code_lines(function) for name, function in functions()}
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}


def test_blocks_are_not_nested_deeply() -> None:
    deep = {name: nesting(function) for name, function in functions()}
    assert {name: depth for name, depth in deep.items() if depth > MAX_NESTING} == {}


def test_the_nesting_measure_counts_blocks() -> None:
    tree = ast.parse("def f():\n if a:\n  pass\n elif b:\n  pass\n else:\n  for x in y:\n   while z:\n    pass")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert nesting(function) == 3


def test_no_class_is_named_after_nothing() -> None:
    empty = ("Manager", "Helper", "Util", "Utils", "Misc")
    classes = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sources("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith(empty)
    }
    files = {str(path.relative_to(ROOT)) for path in sources("*.py") if path.stem.title().endswith(empty)}
    assert classes | files == set()


def looks_up_a_variable(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in {"os.environ.get", "os.getenv"}
    return (
        isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ"
    )


def test_settings_come_from_the_configuration_only() -> None:
    """The environment as a whole may be handed on; no code but the configuration looks up a variable in it."""
    lookups = {
        f"{path.relative_to(ROOT)}:{ast.unparse(node)}"
        for path in sources("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if looks_up_a_variable(node)
    }
    assert lookups == set()
