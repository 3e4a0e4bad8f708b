// What the pages of emu use of Apache ECharts; build.sh makes echarts.min.js of it.
import * as echarts from "echarts/core";
import { BarChart, CustomChart, LineChart, ScatterChart } from "echarts/charts";
import {
  AxisPointerComponent, DataZoomComponent, GridComponent, LegendComponent, MarkAreaComponent,
  MarkLineComponent, TooltipComponent,
} from "echarts/components";
import { LabelLayout } from "echarts/features";
import { CanvasRenderer } from "echarts/renderers";
echarts.use([
  BarChart, CustomChart, LineChart, ScatterChart, AxisPointerComponent, DataZoomComponent,
  GridComponent, LegendComponent, MarkAreaComponent, MarkLineComponent, TooltipComponent,
  CanvasRenderer, LabelLayout,
]);
window.echarts = echarts;
