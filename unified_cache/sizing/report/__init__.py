"""Results for people: sentences, tables and charts, on a terminal or in one HTML file with nothing from elsewhere.

page.html is the frame of a page; page.js draws with Chart.js 4.6.1, chart.umd.min.js, under chart.LICENSE.txt.
"""
