"""Everything under deploy/kubernetes renders, and one file names the image."""

import pathlib
import shutil
import subprocess

import pytest
import yaml

from tests.deploy.files import DEPLOY, pods

ROOT = DEPLOY / "kubernetes"
FOLDERS = {path.parent.name: yaml.safe_load(path.read_text()) for path in sorted(ROOT.rglob("kustomization.yaml"))}
APPLIED = [name for name, found in FOLDERS.items() if found["kind"] == "Kustomization"]


def references(name: str) -> list[pathlib.Path]:
    found = FOLDERS[name]
    return [ROOT / name / each for each in [*found.get("resources", []), *found.get("components", [])]]


def test_every_manifest_belongs_to_one_folder_that_is_applied() -> None:
    manifests = [path for path in ROOT.rglob("*.yaml") if path.name != "kustomization.yaml"]
    named = [path.resolve() for name in FOLDERS for path in references(name) if path.suffix == ".yaml"]
    assert sorted(named) == sorted(manifests) and len(APPLIED) > 3


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_kustomization_names_is_there_and_may_be_named(name: str) -> None:
    """kustomize takes files from below a kustomization alone, and no folder that holds the one that names it."""
    own = (ROOT / name).resolve()
    for path in references(name):
        if path.suffix == ".yaml":
            assert path.is_file() and path.resolve().is_relative_to(own)
        else:
            assert (path / "kustomization.yaml").is_file() and not own.is_relative_to(path.resolve())
    for path in FOLDERS[name].get("components", []):
        assert FOLDERS[pathlib.PurePath(path).name]["kind"] == "Component"


@pytest.mark.parametrize("name", APPLIED)
def test_one_file_names_the_image(name: str) -> None:
    images = [each for each, found in FOLDERS.items() if "images" in found]
    assert images == ["image"]
    below = [path for path in references(name) if path.is_dir()]
    reached = [path.name for path in below] + [more.name for path in below for more in references(path.name)]
    assert reached.count("image") == 1


@pytest.mark.parametrize("name", [name for name, found in FOLDERS.items() if "patches" in found])
def test_patches_lead_somewhere(name: str) -> None:
    [base] = references(name)
    [found] = [
        document
        for path in references(base.name)
        if path.suffix == ".yaml"
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] == FOLDERS[name]["patches"][0]["target"]["kind"]
    ]
    for patch in FOLDERS[name]["patches"]:
        for operation in yaml.safe_load(patch["patch"]):
            *path, _ = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
            node = found
            for part in path:
                node = node[int(part) if isinstance(node, list) else part]
            assert isinstance(node, dict), operation


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl renders the manifests, and is not on the PATH")
@pytest.mark.parametrize("name", APPLIED)
def test_kubectl_renders_it(name: str, tmp_path: pathlib.Path) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "kubernetes")
    image = copy / "image/kustomization.yaml"
    image.write_text(image.read_text().replace("newName: dsv3, newTag: latest", "newName: r.example/d, newTag: v7"))
    done = subprocess.run(["kubectl", "kustomize", copy / name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    documents = [each for each in yaml.safe_load_all(done.stdout) if each]
    containers = [each for document in documents for _, _, pod in pods(document) for each in pod["spec"]["containers"]]
    assert containers and {each["image"] for each in containers} == {"r.example/d:v7"}
    if name == "rdma":
        assert all(each["resources"]["limits"]["rdma/hca"] == "8" for each in containers)
        assert all(each["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"] for each in containers)
