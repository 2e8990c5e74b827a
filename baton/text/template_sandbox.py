"""The Jinja environment of chat templates: what they are written for, sandboxed, and with a budget.

A template comes with the model, so it is trusted as far as the model is; the budget makes sure that whatever it does
with a caller's messages ends, and soon: loop rounds, macro calls and characters are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from baton.core.errors import InvalidRequest

# The name under which a rendering finds its budget; no template can mean it by accident.
_BUDGET = "__budget"


class TemplateRefusal(jinja2.TemplateError):
    """The template called ``raise_exception``: the messages are not what the model expects."""


class Budget:
    """What one rendering may still use: ``steps`` (loop rounds and macro calls) and ``characters``."""

    def __init__(self, steps: int, characters: int) -> None:
        self._max_steps = self._steps = steps
        self._max_characters = self._characters = characters

    def step(self) -> bool:
        """Count a loop round or macro call. True, so that it can stand before a condition."""
        self._steps -= 1
        if self._steps < 0:
            raise InvalidRequest(
                f"messages: the chat template may take {self._max_steps} loop rounds, got more", field="messages"
            )
        return True

    def emit(self, characters: int) -> None:
        """Count characters that were put out."""
        self._characters -= characters
        self.check(-self._characters + self._max_characters)

    def check(self, characters: int) -> None:
        """Refuse a text of so many characters before, or at once after, it exists."""
        if characters > self._max_characters:
            raise InvalidRequest(
                f"messages: the rendered prompt may have {self._max_characters} characters, got more", field="messages"
            )

    def join(self, *parts: object) -> str:
        """The ``~`` operator."""
        texts = [str(part) for part in parts]
        self.check(sum(map(len, texts)))
        return "".join(texts)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; render them with ``render``, which brings the budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}

    def compile_metered(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        metered = _Meter().visit(self.parse(source))
        code = self.compile(metered, filename="<chat template>")
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "**":
            raise jinja2.TemplateRuntimeError("chat templates have no power operator")
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            budget.check(count * len(repeated) if isinstance(repeated, Sized) else 0)
        result: object = super().call_binop(context, operator, left, right)
        budget.check(len(result) if isinstance(result, Sized) else 0)
        return result


def render(template: jinja2.Template, variables: dict[str, object], budget: Budget) -> str:
    """Raises InvalidRequest when the budget is spent, TemplateRefusal, and whatever the template's own code raises."""
    size = 0
    pieces: list[str] = []
    for piece in template.generate({**variables, _BUDGET: budget}):
        pieces.append(piece)
        size += len(piece)
        budget.check(size)
    return "".join(pieces)


def _budget(context: Context) -> Budget:
    budget = context.resolve(_BUDGET)
    assert isinstance(budget, Budget)
    return budget


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Sees every value that is put out, into macros and set blocks too."""
    if isinstance(value, str):
        _budget(context).emit(len(value))
    return value


class _Meter(NodeTransformer):
    """Rewrites a template so that all that repeats or grows goes through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("step"), node.test)
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(self.generic_visit(node))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join", *node.nodes)

    @staticmethod
    def _count(node: Any) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_call("step")))
        return node


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    budget = nodes.Getattr(nodes.Name(_BUDGET, "load"), method, "load")
    return nodes.Call(budget, list(arguments), [], None, None)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's own filter has and models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))
