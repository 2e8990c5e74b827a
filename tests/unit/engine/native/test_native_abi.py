"""The C header and its Python mirror say the same."""

from __future__ import annotations

import ctypes
import re

import pytest

from baton.engine.native.build import SOURCES
from baton.engine.native.library import Fault, FaultCode, Shape, Step, Weight

HEADER = (SOURCES / "abi.h").read_text()


def body_of(kind: str, name: str) -> str:
    found = re.search(rf"{kind} {name}[^{{]*{{(.*?)}};", HEADER, re.DOTALL)
    assert found is not None
    return re.sub(r"//.*", "", found[1])


@pytest.mark.parametrize(("name", "mirror"), [("BatonWeight", Weight), ("BatonFaultCode", FaultCode)])
def test_enumerators_have_the_same_names_and_order(name: str, mirror: type[Weight] | type[FaultCode]) -> None:
    names = [entry.strip().removeprefix("k") for entry in body_of("enum", name).split(",") if entry.strip()]
    assert [entry.lower() for entry in names] == [member.name.replace("_", "").lower() for member in mirror]
    assert [member.value for member in mirror] == list(range(len(names)))


@pytest.mark.parametrize(("name", "mirror"), [("BatonShape", Shape), ("BatonStep", Step), ("BatonFault", Fault)])
def test_structures_have_the_same_fields_in_order(name: str, mirror: type[ctypes.Structure]) -> None:
    fields = re.findall(r"(const int32_t\*|int32_t|float|void\*|float\*) (\w+);", body_of("struct", name))
    assert [field for _, field in fields] == [field[0] for field in mirror._fields_]
    types = {"int32_t": ctypes.c_int32, "float": ctypes.c_float}
    assert [types.get(kind, ctypes.c_void_p) for kind, _ in fields] == [field[1] for field in mirror._fields_]
