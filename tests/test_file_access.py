"""Every function of the package that writes, moves or removes files is listed here;
`docs/reference/security.md` says of what.

A command's output goes through `ir/output_kinds.py` or `ir/output_files.py`. A new function that
touches files by other means fails this test: use these modules, or list the function with what it
touches.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from scripts.structure import syntax_trees

FUNCTIONS = {
    *(f"os.{name}" for name in ("replace", "rename", "renames", "unlink", "remove", "rmdir", "removedirs", "truncate",
                                "ftruncate", "link", "symlink", "mkfifo", "pwrite")),
    *(f"shutil.{name}" for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
    *(f"{module}.{name}" for module in ("np", "numpy") for name in ("save", "savez", "savez_compressed", "savetxt")),
    "torch.save", "np.lib.format.open_memmap", "onnx.save", "onnx.save_model",
}  # fmt: skip
"""Functions that write, move or remove."""
METHODS = {
    "write_text", "write_bytes", "touch", "rename", "unlink", "rmdir", "symlink_to", "hardlink_to", "tofile",
    "export_chrome_trace",
}  # fmt: skip
"""Methods of paths, arrays and profilers that do."""
LISTED: Mapping[str, str] = {
    "ir.output_files:_make_locked_folder": "a new folder of autopipe's own, with its marker",
    "ir.output_files:_move_files": "files of a program that was checked to be unedited",
    "ir.output_files:temporary_folder": "a folder of autopipe's own",
    "ir.output_files:keep_folder": "the marker of a folder of autopipe's own",
    "ir.output_files:move_into_place": "an output that was checked by its kind",
    "ir.output_files:remove_abandoned_folders": "marked folders whose process is dead",
    "ir.output_files:rename_all": "files that were checked to be unedited",
    "ir.output_files:open_replacement_file": "an output that was checked by its kind, and its temporary file",
    "ir.output_files:open_replacement_files": "a folder of autopipe's own",
    "ir.output_files:open_replacement_folder": "a program that was checked to be unedited",
    "ir.output_files:add_digests": "the head in a folder of autopipe's own",
    "ir.plan:write_plan": "files in a folder of autopipe's own",
    "api.export_check:_Comparison._run": "a temporary folder",
    "api.export_check:_take_dropouts_out": "a temporary folder",
    "api.generation:write_prefill": "a temporary folder",
    "api.generation:write_tokens": "an opened output",
    "cli.main:main": "/dev/null",
    "api.plan_folder:_copy_of_edited": "a new file next to an edited configuration",
    "api.plan_folder:write_plan_folder": "files in a folder of autopipe's own",
    "ir.graph_file:write_graph": "files in a folder of autopipe's own",
    "backends.onnxruntime:_save_model": "a temporary folder",
    "backends.onnxruntime:_kernel_times": "a temporary folder",
    "backends.torch.checkpoint:FolderLock.__init__": ".lock in a folder of checkpoints",
    "backends.torch.checkpoint:FolderLock.claim": ".lock in a folder of checkpoints",
    "backends.torch.checkpoint:check_not_in_use": ".lock in a folder of checkpoints, which is only locked",
    "backends.torch.checkpoint:_remove_folder": "a checkpoint that holds no file of others",
    "backends.torch.checkpoint:commit_checkpoint": "a checkpoint that this run wrote",
    "backends.torch.checkpoint:remove_leftovers": "a crashed run's checkpoint that holds no file of others",
    "backends.torch.checkpoint:write_shard": "a new file",
    "backends.torch.codegen.archive:write_arrays": "files in a folder of autopipe's own",
    "backends.torch.codegen.program:replace_folder": "empty folders that this command made",
    "backends.torch.codegen.program:write_program.write": "files in a folder of autopipe's own",
    "backends.torch.fake_cuda:build": "the cache",
    "backends.torch.launcher:run_child": "/dev/null",
    "backends.torch.metrics:JsonLines.write": "metrics.jsonl, which was checked to be a log",
    "backends.torch.metrics:_complete_last_line": "metrics.jsonl, which was checked to be a log",
    "backends.torch.profiler.communication:main": "a temporary folder",
    "backends.torch.profiler.operators:RunnableOperation.of": "a temporary folder",
    "backends.torch.profiler.timed_program:main": "a temporary folder",
    "backends.torch.runtime.state.checkpoint:Checkpointer._write": "the unfinished checkpoint of this run",
    "backends.torch.runtime.watch.clock:StepProfiler.close": "torch's profile in the folder of --log",
    "backends.torch.runtime.data.sources:save_samples": "a temporary folder",
    "backends.torch.runtime.modes.decoder:GenerationRequest.write": "a temporary folder",
    "backends.torch.runtime.modes.dry_run:DryReporter.end_step": "a temporary folder",
    "backends.torch.runtime.watch.failures:install_error_hook.hook": "a temporary folder",
    "backends.torch.runtime.modes.generation:Generation.run": "a temporary folder",
    "backends.torch.runtime.watch.heartbeat:Heartbeat.__init__": "a temporary folder",
    "backends.torch.runtime.manifest:remove_partial_outputs": "unfinished outputs, by their names",
    "backends.torch.runtime.data.outputs:OutputCollector.finish": "unfinished outputs",
    "backends.torch.runtime.data.outputs:RowFile.__init__": "unfinished outputs",
    "backends.torch.runtime.data.outputs:RowFile.finish": "unfinished outputs",
    "backends.torch.runtime.modes.records:dump_tensors": "a temporary folder",
    "backends.torch.runtime.modes.records:run_recorded": "a temporary folder",
    "backends.torch.runtime.watch.report:Reporter._write_records": "a temporary folder",
    "backends.torch.runtime.watch.report:Reporter._write_times": "a temporary folder",
    "backends.torch.verification:write_whole_gradients": "a temporary folder",
    "passes.auto.plan_cache:JsonStore.write": "answers in the cache, by their names",
    "passes.auto.workers:_run_worker": "a pipe",
    "passes.solvers.pulp_client:solve_with_pulp": "a temporary folder",
    "passes.solvers.pulp_worker:main": "a temporary folder",
    "passes.solvers.pulp_worker:solve": "a temporary folder",
}
"""Functions that touch files, as `module:function`, and the files."""


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` as text, "" for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def writes(call: ast.Call) -> bool:
    """Return True if a call writes, moves or removes a file, by its name and the mode it opens a
    file in.
    """
    name = dotted(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in FUNCTIONS or method in METHODS:
        return True
    if method == "replace" and len(call.args) == 1 and not call.keywords:
        return True  # Of a path: text is replaced by two arguments.
    if (
        name in ("open", "os.open", "os.fdopen", "zipfile.ZipFile", "tarfile.open")
        or method == "open"
    ):
        texts = [
            each
            for argument in (*call.args, *(key.value for key in call.keywords))
            for each in ast.walk(argument)
        ]
        modes = {
            each.value
            for each in texts
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        flags = {each.attr for each in texts if isinstance(each, ast.Attribute)}
        return any(
            set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes
        ) or bool(flags & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"})
    return False


def writers(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the names of functions in which a call writes, moves or removes a file."""
    for node in ast.iter_child_nodes(tree):
        own = inside
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own = f"{inside}.{node.name}" if inside else node.name
        if isinstance(node, ast.Call) and writes(node):
            yield own
        yield from writers(node, own)


def test_every_function_that_touches_files_is_listed() -> None:
    found = {
        f"{module.removeprefix('autopipe.')}:{name}"
        for module, tree in syntax_trees().items()
        for name in writers(tree)
    }
    assert found == set(LISTED)


@pytest.mark.parametrize(
    "text",
    [
        "os.replace(a, b)", "shutil.rmtree(a)", "path.rename(b)", "path.unlink()", "path.replace(b)", "open(a, 'w')",
        "path.open('xb', buffering=0)", "open(a, mode='r+b')", "os.open(a, os.O_RDWR | os.O_CREAT)", "np.savez(a, b)",
        "path.write_text(a)", "zipfile.ZipFile(a, 'w')", "torch.save(a, b)",
    ],
)  # fmt: skip
def test_writing_is_recognised(text: str) -> None:
    assert list(writers(ast.parse(f"def f():\n    {text}"))) == ["f"]


@pytest.mark.parametrize(
    "text",
    [
        "text.replace('a', 'b')",
        "open(a)",
        "path.open('rb')",
        "replace(a, b=c)",
        "os.open(a, os.O_RDONLY)",
    ],
)
def test_reading_is_not(text: str) -> None:
    assert not list(writers(ast.parse(f"def f():\n    {text}")))
