"""What must be equal in all processes, and how a difference is reported."""

from pathlib import Path

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.fingerprint import differences, fields_of


def member(process_id: int, num_processes: int = 2) -> ClusterOptions:
    place = {"coordinator": "host:80", "num_processes": num_processes, "process_id": process_id}
    return ClusterOptions(**place, cluster_key_file="key")


def model(directory: Path, tail: bytes = b"") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "a.safetensors").write_bytes(bytes(200_000) + tail)
    return directory


def test_the_same_files_elsewhere_are_the_same(tmp_path: Path) -> None:
    mine = fields_of(model(tmp_path / "a"), EngineOptions(compilation_cache_dir="/x"), member(0))
    theirs = fields_of(model(tmp_path / "b"), EngineOptions(compilation_cache_dir="/y"), member(1))
    assert differences(mine, theirs, 1) == ""


def test_a_directory_with_params_json_alone_has_a_fingerprint(tmp_path: Path) -> None:
    """Mistral's form of a model directory, which one process serves, is served by several too."""
    found = []
    for name, content in (("a", "{}"), ("b", "[]")):
        (model(tmp_path / name) / "config.json").rename(tmp_path / name / "params.json")
        (tmp_path / name / "params.json").write_text(content)
        found.append(fields_of(tmp_path / name, EngineOptions(), member(0))["model config"])
    assert found[0] != found[1]


def test_differences_are_named(tmp_path: Path) -> None:
    mine = fields_of(model(tmp_path / "a"), EngineOptions(), member(0))
    (model(tmp_path / "b", b"x") / "config.json").write_text('{"a": 2}')
    theirs = fields_of(tmp_path / "b", EngineOptions(dtype="float32"), member(1, 3)) | {"--more": "1"}
    text = differences(mine, theirs, 1)
    for name in ("num_processes", "model config", "weights", "--more (none there, 1 in process 1)"):
        assert name in text
    assert "--dtype ('auto' there, 'float32' in process 1)" in text
    assert "code" not in text and "jax" not in text
