"""Self-contained pages: HTML with inline SVG, no script, no network. Every text from outside is escaped here.

Charts are drawn by hand because they are few and must open offline on any machine; a library would bring megabytes.
"""

from freescale.page.blocks import Lane, Segment, StackedBar, heat_map, legend, stacked_bars, timeline
from freescale.page.charts import Axis, Mark, Series, assign_colours, curve_chart, histogram, line_chart, scatter
from freescale.page.markup import document, figure, grid, section, table
