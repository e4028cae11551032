"""Pictures and text of the report: charts as inline SVG, images, numbers as text."""
