"""The messages of `chakra.proto`, built when this module is loaded.

Owns the way from the `.proto` text to protobuf message classes. The text is read at run time
instead of generating code from it: generated code is tied to a version of the protobuf library,
and this way the file is the only definition. Understands what that file uses (messages, oneof,
repeated, scalars), no more.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Final

from emu.documents import Document
from emu.errors import needs_extra

with needs_extra("astra", "config", "latency.backend"):
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILE: Final = "chakra.proto"
_SCALAR_NAMES: Final = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_SCALARS: Final = {
    name: descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in _SCALAR_NAMES
}
_FIELD: Final = re.compile(r"(repeated\s+)?(\w+)\s+(\w+)\s*=\s*(\d+)\s*;")
_OPEN: Final = re.compile(r"(message|oneof)\s+(\w+)\s*\{")


def parse_proto(text: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of a .proto text of the kind described above."""
    text = re.sub(r"//[^\n]*", "", text)
    package = re.search(r"package\s+([\w.]+)\s*;", text)
    assert package is not None
    file = descriptor_pb2.FileDescriptorProto(
        name=f"emu/backends/astra/{_FILE}", package=package.group(1), syntax="proto3"
    )
    message: descriptor_pb2.DescriptorProto | None = None
    in_oneof = False
    position = package.end()
    while match := re.compile(r"\s*(\}|" + _OPEN.pattern + "|" + _FIELD.pattern + ")").match(
        text, position
    ):
        position = match.end()
        statement = match.group(1)
        if opened := _OPEN.fullmatch(statement):
            if opened.group(1) == "message":
                message = file.message_type.add(name=opened.group(2))
            else:
                assert message is not None
                message.oneof_decl.add(name=opened.group(2))
                in_oneof = True
        elif statement == "}":
            if in_oneof:
                in_oneof = False
            else:
                message = None
        else:
            assert message is not None
            _add_field(file, message, statement, in_oneof)
    assert not text[position:].strip(), f"cannot read {text[position : position + 40]!r}"
    return file


def _add_field(
    file: descriptor_pb2.FileDescriptorProto,
    message: descriptor_pb2.DescriptorProto,
    statement: str,
    in_oneof: bool,
) -> None:
    match = _FIELD.fullmatch(statement)
    assert match is not None
    repeated, kind, name, number = match.groups()
    field = message.field.add(name=name, number=int(number))
    proto = descriptor_pb2.FieldDescriptorProto
    field.label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = proto.TYPE_MESSAGE
        field.type_name = f".{file.package}.{kind}"
    if in_oneof:
        field.oneof_index = 0


def _load() -> Document:
    text = resources.files("emu.backends.astra").joinpath(_FILE).read_text(encoding="utf-8")
    file = parse_proto(text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in names
    }


_MESSAGES: Final = _load()
AttributeProto: Final = _MESSAGES["AttributeProto"]
GlobalMetadata: Final = _MESSAGES["GlobalMetadata"]
NodeProto: Final = _MESSAGES["Node"]
