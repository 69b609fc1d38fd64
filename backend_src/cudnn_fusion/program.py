"""From a PyTorch model to a program: loading, torch.export, lowering, passes, and checks of the result."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from cudnn_fusion.batch_check import find_batch_axis, random_inputs
from cudnn_fusion.declarations import InputDeclaration, dynamic_axes, example_sizes
from cudnn_fusion.dims import evaluate_shape
from cudnn_fusion.export_errors import ExportError, explain, first_line
from cudnn_fusion.interpreter import Interpreter, dtype_named
from cudnn_fusion.lowered import PRECISIONS, Axis, Program, ProgramError, cast, in_type
from cudnn_fusion.lowering import lower
from cudnn_fusion.operations import is_random
from cudnn_fusion.passes import optimize

# Largest relative root-mean-square difference from the model that rounding explains.
_ROUNDING = {"fp32": 1e-3, "tf32": 1e-3, "fp16": 3e-2, "bf16": 1e-1}


def load_model(reference: str) -> torch.nn.Module | ExportedProgram:
    """The model that ``package.module:factory`` makes, or that a ``.pt2`` file holds.

    The current directory is importable. A ``.pt2`` is loaded by torch, which unpickles parts of it: load only
    files that you trust. ProgramError says what of the reference is wrong.
    """
    if reference.endswith(".pt2"):
        return _load_pt2(Path(reference))
    module_name, colon, factory_name = reference.partition(":")
    if not colon or not module_name or not factory_name.isidentifier():
        raise ProgramError(f"model {reference!r}: expected package.module:factory or the path of a .pt2 file")
    factory = getattr(_import(reference, module_name), factory_name, None)
    if factory is None:
        raise ProgramError(f"model {reference!r}: {module_name} has no {factory_name!r}")
    model = factory if isinstance(factory, torch.nn.Module) else _make(reference, factory)
    if not isinstance(model, torch.nn.Module | ExportedProgram):
        raise ProgramError(
            f"model {reference!r}: {factory_name} gave {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


def _make(reference: str, factory: Any) -> Any:
    if not callable(factory):
        raise ProgramError(
            f"model {reference!r} is {type(factory).__name__}, expected a function without arguments that "
            "returns a torch.nn.Module"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ProgramError(f"model {reference!r} cannot be called without arguments: {error}") from None
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ProgramError(f"model {reference!r} cannot be made: {_what_and_where(error)}") from error


def _what_and_where(error: BaseException) -> str:
    """``ValueError: no such size (net.py:12)``: for a failure in code that is not this package's."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = traceback.format_exception_only(error)[-1].strip()  # also where the error cannot say what it is
    return f"{what} ({last.filename}:{last.lineno})"


def _import(reference: str, module_name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ProgramError(
            f"model {reference!r}: no module {error.name!r} (searched from {os.getcwd()} and in "
            "the installed packages)"
        ) from None
    except (Exception, SystemExit) as error:
        raise ProgramError(f"model {reference!r} cannot be imported: {_what_and_where(error)}") from error


def _load_pt2(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise ProgramError(f"model {str(path)!r}: there is no such file")
    try:
        return torch.export.load(path)
    except Exception as error:
        raise ProgramError(
            f"model {str(path)!r} is not a program saved by torch.export.save of a compatible version: "
            f"{first_line(error)}"
        ) from error


def export_program(
    model: torch.nn.Module | ExportedProgram,
    declarations: Sequence[InputDeclaration],
    precision: str,
    *,
    name: str = "model",
    output_names: Sequence[str] | None = None,
) -> tuple[ExportedProgram, Program]:
    """Exports ``model`` for inference in ``precision`` and lowers it.

    The model itself is not changed. Inputs are matched to forward()'s parameters by name if every declared
    name is one of them, else by position. ``tf32`` programs hold fp32 weights. The program is run once on the
    CPU at its smallest sizes and compared with the model.

    ExportError: torch.export cannot trace it. ProgramError: it cannot be served.
    """
    if precision not in PRECISIONS:
        raise ProgramError(f"precision {precision!r} is not available: use one of {', '.join(PRECISIONS)}")
    if not declarations:
        raise ProgramError("a model needs at least one input; declare it as NAME:DTYPE[...]")
    module = _own_copy(model)
    declarations = _in_parameter_order(module, declarations)
    named = chain(module.named_parameters(), module.named_buffers())
    originals = {key: tensor.detach().clone() for key, tensor in named}
    _cast(module, getattr(torch, PRECISIONS[precision]))
    exported = _export(module, declarations, getattr(torch, PRECISIONS[precision]))
    program = lower(exported, name, precision, declarations, output_names)
    program = optimize(program, originals)
    comparison = _check_against(module, program, declarations)
    smallest = {axis.name: axis.minimum for axis in program.axes}
    batch_axis, why = find_batch_axis(program, smallest)
    notes = (*program.notes, *([comparison] if comparison else []), why)
    return exported, replace(program, batch_axis=batch_axis, notes=notes)


def _own_copy(model: torch.nn.Module | ExportedProgram) -> torch.nn.Module:
    """A copy of the model in inference mode."""
    if isinstance(model, ExportedProgram):
        return _without_input_guards(model.module())
    if isinstance(model, torch.jit.ScriptModule):
        raise ProgramError("the model is TorchScript, which torch.export does not take: give the nn.Module")
    values = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, value in values if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise ProgramError(f"{', '.join(lazy[:5])} have no size yet: run the model once in the factory")
    without = [name for name, value in values if value.is_meta]
    if without:
        raise ProgramError(
            f"{', '.join(without[:5])} are on the meta device: load the weights in the factory"
        )
    try:
        module = copy.deepcopy(model)
    except Exception as error:
        raise ProgramError(
            f"the model cannot be copied ({first_line(error)}): keep tensors with gradients, handles and "
            "locks out of its attributes"
        ) from error
    module = module.cpu().eval()
    training = [str(name or type(part).__name__) for name, part in module.named_modules() if part.training]
    if training:
        raise ProgramError(
            f"after eval() these parts are still in training mode: {', '.join(training[:5])}. Their own "
            "train() or eval() keeps them there; change that, or dropout and batch statistics are exported"
        )
    return module


def _without_input_guards(module: torch.nn.Module) -> torch.nn.Module:
    """Takes the checks for the first export's sizes and types out of a .pt2's module: it is exported anew."""
    assert isinstance(module, torch.fx.GraphModule)
    for node in list(module.graph.nodes):
        guard = node.op == "call_module" and node.target == "_guards_fn"
        if not node.users and (guard or "_assert_tensor_metadata" in str(node.target)):
            module.graph.erase_node(node)
    module.recompile()
    return module


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts floating parameters and buffers; complex ones stay (Module.to would drop imaginary parts)."""
    cast: dict[int, torch.Tensor] = {}
    for part in module.modules():
        parameters = part.named_parameters(recurse=False, remove_duplicate=False)
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in list(chain(parameters, buffers)):
            if not tensor.is_floating_point():
                continue
            if id(tensor) not in cast:
                values = tensor.detach().to(dtype, copy=True)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                cast[id(tensor)] = torch.nn.Parameter(values, False) if is_parameter else values
            setattr(part, name, cast[id(tensor)])


def _export(
    module: torch.nn.Module, declarations: Sequence[InputDeclaration], dtype: torch.dtype
) -> ExportedProgram:
    sizes = example_sizes(declarations)
    dims = {
        axis.name: Dim(axis.name, min=axis.minimum, max=axis.maximum) for axis in dynamic_axes(declarations)
    }
    examples = [_example(declaration, sizes, dtype) for declaration in declarations]
    dynamic = [
        {i: dims[dim.name] for i, dim in enumerate(d.dims) if isinstance(dim, Axis)} for d in declarations
    ]
    args, kwargs, shapes = _arguments(module, declarations, examples, dynamic)
    try:
        # torch prints the half-made graph to stderr when it refuses a model.
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
            functional: ExportedProgram = exported.run_decompositions({})
            return functional
    except Exception as error:
        raise ExportError(explain(error, declarations)) from error


def _example(declaration: InputDeclaration, sizes: dict[str, int], dtype: torch.dtype) -> torch.Tensor:
    shape = [sizes[dim.name] if isinstance(dim, Axis) else dim for dim in declaration.dims]
    if declaration.torch_dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.zeros(shape, dtype=declaration.torch_dtype)


def _parameter_names(module: torch.nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _takes_keywords(module: torch.nn.Module) -> bool:
    """Whether this is the module of a .pt2 that was exported with keyword arguments, and takes only those."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    spec = module._in_spec
    _, kwargs = pytree.tree_unflatten([None] * spec.num_leaves, spec)
    return bool(kwargs)


def _in_parameter_order(
    module: torch.nn.Module, declarations: Sequence[InputDeclaration]
) -> Sequence[InputDeclaration]:
    """The declarations in the order of forward()'s parameters if they all have the name of one."""
    names = _parameter_names(module)
    if all(declaration.name in names for declaration in declarations):
        return sorted(declarations, key=lambda declaration: names.index(declaration.name))
    return declarations


def _arguments(
    module: torch.nn.Module,
    declarations: Sequence[InputDeclaration],
    tensors: Sequence[torch.Tensor],
    dynamic: Sequence[Any],
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """How ``tensors`` are passed to forward(): positional, by name, and the dynamic dimensions likewise."""
    parameters = _parameter_names(module)
    names = [declaration.name for declaration in declarations]
    if _takes_keywords(module) or (set(names) <= set(parameters) and names != parameters[: len(names)]):
        return (), dict(zip(names, tensors, strict=True)), dict(zip(names, dynamic, strict=True))
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        starred = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        return tuple(tensors), {}, (*dynamic[:starred], tuple(dynamic[starred:]))
    try:
        inspect.signature(module.forward).bind(*tensors)
    except TypeError as error:
        raise ProgramError(
            f"declared inputs ({', '.join(names)}) do not fit forward({', '.join(parameters)}): {error}"
        ) from None
    return tuple(tensors), {}, tuple(dynamic)


def _check_against(
    module: torch.nn.Module, program: Program, declarations: Sequence[InputDeclaration]
) -> str | None:
    """Compares the program with the model at the smallest declared sizes; a note when they differ in half
    precision or cannot be compared, ProgramError when they differ in single precision."""
    if any(is_random(node.op) for node in program.nodes):
        return "not compared with the model, because it draws random numbers"
    smallest = {axis.name: axis.minimum for axis in program.axes}
    inputs = random_inputs(program.inputs, smallest, seed=0)
    result, answers, problem = None, None, ""
    # Half precision in single, where the model can: many CPUs compute it a hundred times slower.
    for dtype in dict.fromkeys(("float32", PRECISIONS[program.precision])):
        try:
            result, answers = _both(module, program, declarations, inputs, dtype)
            break
        except (RuntimeError, ValueError, IndexError) as error:
            problem = first_line(error)
    if answers is None:
        return f"not compared with the model at sizes {smallest}: {problem}"
    for spec, answer in zip(program.outputs, answers, strict=True):
        if tuple(answer.shape) != (declared := evaluate_shape(spec.shape, smallest)):
            raise ProgramError(
                f"output {spec.name!r} has the shape {list(answer.shape)} at sizes {smallest}, expected "
                f"{list(declared)}: the model broadcasts at this size; raise the smallest size of the axis"
            )
    expected = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    worst = max(_difference(a, e) for a, e in zip(answers, expected, strict=True))
    if worst <= _ROUNDING[program.precision]:
        return None
    found = (
        f"the program's answers differ from the model's at sizes {smallest} (relative difference {worst:.2g})"
    )
    if program.precision in ("fp32", "tf32"):
        raise ProgramError(f"{found}: the model may take another path at this size; narrow the ranges")
    return f"{found}: compare answers with the model in fp32 before serving it in {program.precision}"


def _both(
    module: torch.nn.Module,
    program: Program,
    declarations: Sequence[InputDeclaration],
    inputs: Sequence[torch.Tensor],
    dtype: str,
) -> tuple[Any, list[torch.Tensor]]:
    """What the model and the program give, both computing in ``dtype``."""
    wanted: torch.dtype = getattr(torch, dtype)
    if dtype != PRECISIONS[program.precision]:
        module = copy.deepcopy(module)
        _cast(module, wanted)
        program = in_type(program, dtype)
    fed = [x.to(wanted) if x.is_floating_point() else x for x in inputs]
    args, kwargs, _ = _arguments(module, declarations, fed, [None] * len(fed))
    with torch.no_grad():
        result = module(*(x.clone() for x in args), **{key: x.clone() for key, x in kwargs.items()})
        weights = cast(program.weights, wanted)
        given = [x.to(dtype_named(spec.dtype)) for x, spec in zip(inputs, program.inputs, strict=True)]
        return result, Interpreter(program, weights, torch.device("cpu")).run(given)


def _difference(answer: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative root-mean-square difference where both are finite; infinite for another shape."""
    if answer.shape != expected.shape:
        return float("inf")
    kind = torch.complex128 if expected.is_complex() else torch.float64
    a, e = answer.to(kind), expected.to(kind)
    finite = torch.isfinite(a) & torch.isfinite(e)
    norm = float(e[finite].norm())
    return float((a[finite] - e[finite]).norm()) / (norm or 1.0)
