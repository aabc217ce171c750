"""Self-contained pages: HTML with inline SVG, no script, no network. Every text from outside is escaped here.

Charts are drawn by hand because they are few and must open offline on any machine; a library would bring megabytes.
"""

from freescale.page.axes import Axis
from freescale.page.blocks import Bar, Lane, Piece, heat_map, legend, stacked_bars, timeline
from freescale.page.charts import Series, histogram, line_chart, scatter
from freescale.page.curves import Mark, colours_of, curve_chart
from freescale.page.document import document, figure, grid, section, table
