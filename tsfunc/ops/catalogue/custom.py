"""``tsfunc.ops.register``: a category and a batching rule for a custom operator."""

from __future__ import annotations

import sys
from typing import Any

from tsfunc.errors import DispatchError, UnknownOperatorError
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.category_rules import rule_of_category
from tsfunc.ops.registry import Category, Rule, declare


def register(operator: Any, *, category: Category | str, rule: Rule | None = None) -> None:
    """Register the shape category of a custom operator, and optionally its batching rule.

    Args:
        operator: the result of ``torch.library.custom_op``, an overload, or a dispatcher name
            (``"mylib::scale"``).
        category: how the shapes of its results follow from those of its arguments, as a
            :class:`Category` or its name.
        rule: its batching rule, ``rule(op, level, bdims, args, kwargs) -> (out, out_dims)``;
            see NOTE [batching rules] in ``tsfunc/ops/registry.py``. Without a rule, vmap uses the
            rule of the category if one exists (TensorIterator; Identity and Batched with one
            tensor and without arguments that name dims) and if the operator's fake kernel agrees
            with it on shapes. Otherwise vmap loops over the examples, with a
            ``SlowFallbackWarning``. Identity asserts that each element of the result depends only
            on the element at the same position.

    A rule that was registered with ``torch.library.register_vmap`` is used without registration
    here. If both exist, the rule registered here has precedence.

    Raises:
        UnknownOperatorError: torch has no operator of this name.
        DispatchError: the operator is one of torch's own, or is registered already.
        ValueError: there is no category of this name.

    Example:
        >>> import torch, tsfunc
        >>> @torch.library.custom_op("doc::double_rows", mutates_args=())
        ... def double_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
        ...     return torch.cat([x[:rows] * 2, x[rows:]])
        >>> def rule(op, level, bdims, args, kwargs):
        ...     x, rows = args
        ...     x = x.movedim(bdims[0], 1)  # the rows come first, then the batch
        ...     return op(x, rows), 1
        >>> tsfunc.ops.register(double_rows, category="N-Dimensional", rule=rule)
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> tsfunc.vmap(lambda x: double_rows(x, 1))(x)
        tensor([[0., 1., 2.],
                [6., 4., 5.]])
        >>> tsfunc.ops.lookup("doc::double_rows").category.value
        'N-Dimensional'

    Source:
        ``torch.library.register_vmap``, for rules that keep the batch dim in place.
    """
    name = operator if isinstance(operator, str) else reader().name(operator)
    wanted = Category(category)
    signature = reader().signature(name)
    if signature is None:
        raise UnknownOperatorError(
            f"register({operator!r}): torch has no operator of this name. Define it first, with "
            f"torch.library.custom_op or torch.library.define."
        )
    if name.startswith("aten::"):
        raise DispatchError(
            f"register({name!r}): this is one of torch's own operators, whose categories and rules "
            f"are tsfunc's. To have a kernel of yours called instead, use "
            f"tsfunc.dispatch.register({name!r}, tsfunc.dispatch.DispatchKey.Batch, kernel)."
        )
    caller = sys._getframe(1)
    position = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    declare(rule or rule_of_category(wanted, signature), (name,), position, wanted)
