"""The corpus: what belongs to it, and a split that depends on names alone."""

from pathlib import Path

from training import corpus


def test_split_is_disjoint_complete_and_the_same_each_time() -> None:
    docs = corpus.documents(corpus.standard_library())
    train, held_out = corpus.split_documents(docs)
    names = [{d.name for d in part} for part in (train, held_out)]
    assert not names[0] & names[1]
    assert len(train) + len(held_out) == len(docs)
    assert 0.01 < len(held_out) / len(docs) < 0.05
    assert corpus.documents(corpus.standard_library()) == docs


def test_split_ignores_content_and_place_in_the_list(library: Path) -> None:
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


def test_topics_become_documents_of_their_own(library: Path) -> None:
    (library / "pydoc_data").mkdir()
    (library / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The \"if\" statement\\n', 'del': 'Deletion'}\n")
    topics = [d for d in corpus.documents(library) if d.name.startswith("topics/")]
    assert topics == [corpus.Document("topics/del", "Deletion"), corpus.Document("topics/if", 'The "if" statement\n')]
