"""The corpus: its documents, a split by name, licences, no copies of held-out text."""

from pathlib import Path

import pytest

from training import corpus
from training.corpus import Document

LINES = [f"the statement number {n} of a text that is long enough = {n}" for n in range(9)]


def test_split_is_disjoint_complete_and_deterministic() -> None:
    docs = corpus.documents(corpus.standard_library())
    train, held_out = corpus.split_documents(docs)
    names = [{d.name for d in part} for part in (train, held_out)]
    assert not names[0] & names[1]
    assert len(train) + len(held_out) == len(docs)
    assert 0.01 < len(held_out) / len(docs) < 0.05
    assert corpus.documents(corpus.standard_library()) == docs


def test_split_ignores_content_and_order(library: Path) -> None:
    before = corpus.split_documents(corpus.documents(library))
    (library / "aaa.py").write_text("x = 1\n")
    (library / "module1.py").write_text("y = 2\n")
    after = corpus.split_documents(corpus.documents(library))
    added = {"aaa.py"}
    assert {d.name for d in after[0]} - added == {d.name for d in before[0]} - added
    assert {d.name for d in after[1]} - added == {d.name for d in before[1]} - added


def test_installed_packages_tests_and_build_results_are_left_out(library: Path) -> None:
    for name in ("site-packages/x.py", "test/x.py", "encodings/cp1.py", "_sysconfigdata__linux.py", "package/empty.py"):
        path = library / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else "x = 1\n")
    assert all(d.name.startswith(("module", "package/module")) for d in corpus.documents(library))


def test_topics_become_separate_documents(library: Path) -> None:
    (library / "pydoc_data").mkdir()
    (library / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The \"if\" statement\\n', 'del': 'Deletion'}\n")
    topics = [d for d in corpus.documents(library) if d.name.startswith("topics/")]
    assert topics == [Document("topics/del", "Deletion"), Document("topics/if", 'The "if" statement\n')]


def install(root: Path, name: str, metadata: str, files: dict[str, str]) -> None:
    """Installs a package and its metadata under `root` as pip does."""
    info = root / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.2\n{metadata}\n\nAbout {name}.\n")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_sources_and_description_are_read_without_tests_and_copies_of_others(site: Path) -> None:
    paths = (
        "b.py",
        "a.py",
        "tests/x.py",
        "test_y.py",
        "z_test.py",
        "m_pb2.py",
        "_vendor/v.py",
        "data.json",
        "empty.py",
    )
    files = {f"thing_one/{path}": "" if path == "empty.py" else f"# {path}\n" for path in paths}
    files["thing_one/table.py"] = "#" * (corpus.MAX_BYTES + 1)
    install(site, "thing_one", "License-Expression: MIT", files)
    found = corpus.package_documents("thing_one")
    assert [doc.name for doc in found] == ["thing_one/README", "thing_one/thing_one/a.py", "thing_one/thing_one/b.py"]
    assert [doc.text.strip() for doc in found] == ["About thing_one.", "# a.py", "# b.py"]
    assert corpus.facts("thing_one") == {"version": "1.2", "licence": "MIT"}


@pytest.mark.parametrize(
    ("metadata", "permissive"),
    [
        ("License: Apache 2.0", True),
        ("License: Copyright (c) me\nClassifier: License :: OSI Approved :: BSD License", True),
        ("License-Expression: MPL-2.0 AND MIT", False),
        ("License: MIT\nClassifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)", False),
        ("License: LicenseRef-Proprietary", False),
        ("Summary: without a licence", False),
    ],
)
def test_only_permissive_licences_are_accepted(site: Path, metadata: str, permissive: bool) -> None:
    install(site, "thing_two", metadata, {"thing_two.py": "x = 1\n"})
    if permissive:
        assert len(corpus.package_documents("thing_two")) == 2
    else:
        with pytest.raises(ValueError, match="thing_two: the licence"):
            corpus.package_documents("thing_two")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no_such_thing is not installed"):
        corpus.package_texts(["no_such_thing"], [])


def test_a_backport_of_a_held_out_document_is_left_out() -> None:
    held_out = [Document("sched.py", "\n".join(LINES)), Document("other.py", "pass\n")]
    backport = Document("p/sched.py", "import new\n" + "\n".join(f"    {line}" for line in LINES))
    alike = Document("p/alike.py", "\n".join(LINES[: corpus.MAX_SHARED_LINES]))
    assert corpus.remove_copies([backport, alike], held_out) == [alike]
