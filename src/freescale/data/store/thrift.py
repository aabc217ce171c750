"""The footer of a Parquet file as plain Python: structs by field number, lists, numbers and bytes.

Only for files that nobody vouches for: where a field of a column is damaged, Arrow's own way to it ends the process.
"""

from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LISTS, _STRUCT = 1, 2, 3, 7, 8, (9, 10), 12
_NUMBERS = (4, 5, 6)


class Compact:
    """Thrift's compact protocol, read from the begin of some bytes. Raises IndexError or ValueError on others."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        """Fields by their number."""
        fields, number = dict[int, Any](), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number()
        if kind == _BYTES:
            return self._bytes(self._varint())
        if kind in _LISTS:
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list, where a flag takes a byte
            return self._byte()
        raise ValueError(f"a footer has no field of type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise IndexError("a field is longer than the footer")
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
