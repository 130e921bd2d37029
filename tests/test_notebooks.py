"""The notebooks run, and still print what they are kept with.

    python tests/test_notebooks.py      # runs them all and keeps the new outputs

Cells tagged "varies" print times, or what another rounding may change. Pictures are not compared: some draw times, and
fonts differ.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000  # of one file with its pictures
KERNEL = "python3"
WITH_FEWER_PROGRAMS = ("1_quickstart", "3_kv_memory", "5_grpo", "6_inside_the_model")
FEWER_PROGRAMS = f"""
import sys
sys.path.append({str(Path(__file__).parent.parent)!r})
from tests.few_programs import few_programs
few = few_programs()
few.__enter__()
"""
# By notebook: source -> what runs instead, with the same calls of jaxpage.
SHORTER = {
    "3_kv_memory": {"questions=20": "questions=5", '("auto", "int8", "int4")': '("auto", "int4")'},
    "5_grpo": {
        "STEPS, PROMPTS, GROUP = 40, 8, 8": "STEPS, PROMPTS, GROUP = 2, 2, 4",
        '"max_num_seqs": 64,': '"max_num_seqs": 8,',
        '"max_num_batched_tokens": 256': '"max_num_batched_tokens": 64',
        "for _ in range(50)": "for _ in range(8)",
        "SamplingParams(max_tokens=80,": "SamplingParams(max_tokens=32,",
    },
    "6_inside_the_model": {
        "LLM(str(checkpoint()),": "LLM(str(checkpoint()), max_num_seqs=8, max_num_batched_tokens=64,",
    },
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def environment(folder: Path) -> dict[str, str]:
    """Variables with which a kernel of this very Python is found, and nothing is left elsewhere.

    `folder` takes the kernel's description: without it one of the user's might come first.
    """
    write_kernel_spec(folder / "kernels" / KERNEL)
    return {
        "JUPYTER_PATH": str(folder),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
    }


def run(path: Path, folder: Path, *, shorten: bool = False) -> NotebookNode:
    """The notebook with fresh outputs, from a kernel that works in `folder`.

    `shorten`: runs that are long are cut as `SHORTER` says, and engines of some notebooks have fewer programs.

    Raises nbclient's CellExecutionError if a cell does.
    """
    notebook = nbformat.read(path, as_version=4)
    for long, short in SHORTER.get(path.stem, {}).items() if shorten else ():
        changed = [cell for cell in code_cells(notebook) if long in cell.source]
        assert len(changed) == 1, long
        changed[0].source = changed[0].source.replace(long, short)
    metadata = dict(notebook.metadata)
    with_fewer = shorten and path.stem in WITH_FEWER_PROGRAMS
    if with_fewer:
        notebook.cells.insert(0, new_code_cell(FEWER_PROGRAMS))
    NotebookClient(
        notebook,
        kernel_name=KERNEL,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    if with_fewer:
        del notebook.cells[0]
    notebook.metadata = NotebookNode(metadata)  # the kernel adds its version of Python
    for cell in code_cells(notebook):  # progress bars are for who waits
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: NotebookNode) -> str:
    """The text among a cell's outputs; the text that stands for a picture does not count."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif "image/png" not in output.data:
            texts.append(output.data["text/plain"])
    return "".join(texts)


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs_and_prints_what_it_is_kept_with(path, tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)  # optax wants jax's own
    kept, fresh = nbformat.read(path, as_version=4), run(path, tmp_path, shorten=True)
    for before, now in zip(code_cells(kept), code_cells(fresh), strict=True):
        if "varies" not in now.metadata.get("tags", ()):
            assert printed(now) == printed(before), now.source


@each_notebook
def test_a_notebook_is_kept_with_its_outputs(path):
    assert path.stat().st_size < MAX_BYTES
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", ()) for o in outputs)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(environment(Path(name)), JAX_PLATFORMS="cpu")
        for path in NOTEBOOKS:
            nbformat.write(run(path, Path(name)), path)


if __name__ == "__main__":
    main()
