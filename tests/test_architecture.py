"""Holds the structure that docs/architecture.md promises: imports point one way, files and functions stay small."""

import ast
import functools
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": {"dsv3.config", "tools.plan.deployment", "training.config"},
    "pallas_kernels": set(),
    "sharding": {"pallas_kernels"},
    "dsv3": {"sharding", "pallas_kernels"},
    "router": {"dsv3"},
    "training": {"dsv3", "sharding", "pallas_kernels"},
    "tools": {"router", "dsv3", "sharding", "pallas_kernels", "configs"},
    "launch": {"tools", "router", "training", "dsv3", "sharding", "pallas_kernels", "configs"},
}
# Words for which vLLM, SGLang, HTTP or English have others, by which an engineer from there finds names with grep.
OLD_WORDS = {
    *(
        "front",
        "fronts",
        "face",
        "faces",
        "gang",
        "keeper",
        "ferry",
        "usher",
        "intake",
        "aside",
        "asides",
    ),
    *("news", "arena", "meeting", "meetings", "told", "tell", "tells", "hear", "heard", "look", "bury", "guilty"),
    *("stranger", "strangers", "nobody", "somebody", "everybody", "whoever"),
}
PREPOSITIONS = {"Of", "By", "As", "From", "With", "For", "In", "To", "At", "On"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FUNCTION_LINES = 12
# Modules that touch jax's private interface, each of which states why in its docstring.
PRIVATE_JAX_MODULES = {"dsv3/engine/device/pool.py", "pallas_kernels/mosaic.py", "sharding/collectives.py"}


def sources() -> list[pathlib.Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(tree: ast.Module) -> set[str]:
    """Every absolute module an AST imports; `from a import b` counts as both a and a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_allowed(package: str, module: str) -> bool:
    first = module.split(".")[0]
    if first not in MAY_IMPORT or first == package:
        return True
    return any(module == allowed or module.startswith(allowed + ".") for allowed in MAY_IMPORT[package])


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / package).rglob("*.py")
        for module in sorted(imported_modules(parse(path)))
        if not is_allowed(package, module) and module != "dsv3"
    ]
    assert not wrong


def test_names_of_the_runtime_have_no_old_words() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] in ("dsv3", "sharding", "pallas_kernels", "router")
        for name in re.findall(r"[A-Za-z_]\w*", " ".join(_names(parse(path))))
        if name != "hugging_face"
        and OLD_WORDS.intersection(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
    }
    assert not found


def _names(tree: ast.Module) -> set[str]:
    """Returns the names that a module defines or uses."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return names | {node.name for node in ast.walk(tree) if isinstance(node, definitions)}


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, set[str]] = {}
    for path in sources():
        module = str(path.relative_to(ROOT))
        names = [node.name.lstrip("_") for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
        for name in names:
            found.setdefault(name, set()).add(module)
    repeated = {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}
    assert not repeated


def test_imports_inside_the_packages_keep_their_contracts() -> None:
    """The contracts are in pyproject.toml: layers of dsv3 and of the engine, and a front without jax.

    The check has a process of its own, since it disables the loggers that exist: `caplog` of later tests stayed empty.
    """
    check = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    found = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr


def test_docstrings_open_with_no_preposition() -> None:
    """A leading preposition hides what a function gives (docs/glossary.md and CONTRIBUTING.md have the rules)."""
    wrong = [
        f"{path.relative_to(ROOT)}: {doc.splitlines()[0]}"
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (doc := ast.get_docstring(node)) and doc.split()[0] in PREPOSITIONS
    ]
    assert not wrong


def test_docstrings_of_functions_open_with_a_verb() -> None:
    """Those of properties, classes and modules may open with a noun; "400: ..." says what status an error has."""
    wrong = [
        f"{path.relative_to(ROOT)}: {doc.splitlines()[0]}"
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if (doc := ast.get_docstring(node)) and not re.match(r"[A-Z][a-z]+s\b(?!')|See |\d{3}: ", doc)
    ]
    assert not wrong


def test_files_stay_small() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_functions_stay_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN_FUNCTION_LINES


def test_private_jax_interface_is_isolated() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(module.startswith("jax._src") for module in imported_modules(parse(path)))
    }
    assert users == PRIVATE_JAX_MODULES


def test_nothing_served_depends_on_the_oracle() -> None:
    oracle = {"torch", "transformers"}
    users = {str(p) for p in sources() for m in imported_modules(parse(p)) if m.split(".")[0] in oracle}
    assert not users
