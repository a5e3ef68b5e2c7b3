// The picture of a model on its nodes: layers run from left to right, nodes from top to bottom.

import { ENDED, type Call, type MeshNode, type Model, type Shard, type Stage } from '../api/types';

export interface Frame {
  width: number;
  layers: number;
  rows: number;
  /** Room for the nodes' names: beside the rows, or above each on a narrow page. */
  labelWidth: number;
  rowHeight: number;
  top: number;
}

/** How the picture is laid out in `width` pixels. */
export function frameOf(width: number, layers: number, rows: number): Frame {
  const narrow = width < 620;
  return { width, layers, rows, labelWidth: narrow ? 0 : 212, rowHeight: narrow ? 62 : 48, top: 36 };
}

export function heightOf(frame: Frame): number {
  return frame.top + frame.rows * frame.rowHeight + 4;
}

/** Left edge of a layer's column; `layer` may be the border after the last one. */
export function xOf(frame: Frame, layer: number): number {
  return frame.labelWidth + ((frame.width - frame.labelWidth) * layer) / Math.max(frame.layers, 1);
}

/** Top of a row's bars. */
export function barTop(frame: Frame, row: number): number {
  return frame.top + row * frame.rowHeight + (frame.labelWidth === 0 ? 24 : 9);
}

/** Height of a bar: its range is written in the upper half, routes run through the lower. */
export const BAR = 30;

export interface Bar {
  key: string;
  shard: Shard;
  x: number;
  y: number;
  width: number;
  /** Share of the shard that is there: below 1 while it loads. */
  progress: number;
  /** What keeps it from being used, '' when nothing does. */
  waits: string;
}

export function barsOf(frame: Frame, node: MeshNode, model: string, row: number): Bar[] {
  return node.shards
    .filter((shard) => shard.model === model)
    .map((shard) => {
      const x = xOf(frame, shard.start_layer);
      const waits = shard.state === undefined || shard.state === 'ready' || shard.state === 'draining' ? '' : shard.state;
      return {
        key: `${shard.start_layer}-${shard.end_layer}`,
        shard,
        x: x + 1,
        y: barTop(frame, row),
        width: Math.max(xOf(frame, shard.end_layer + 1) - x - 2, 2),
        progress: waits === '' ? 1 : Math.min(Math.max(shard.progress ?? 0, 0), 1),
        waits,
      };
    });
}

/** The nodes that hold or load part of the model: by their first layer, then by name. */
export function rowsOf(nodes: Iterable<MeshNode>, model: string): MeshNode[] {
  const first = (node: MeshNode): number =>
    Math.min(...node.shards.filter((shard) => shard.model === model).map((shard) => shard.start_layer));
  return [...nodes]
    .filter((node) => node.shards.some((shard) => shard.model === model))
    .sort((a, b) => first(a) - first(b) || (a.name < b.name ? -1 : 1));
}

export interface RouteLine {
  key: string;
  stages: Stage[];
  calls: number;
  path: string;
}

/** Routes beyond these are counted, not drawn: lines on lines say nothing. */
export const MAX_LINES = 6;

export function routeKey(stages: readonly Stage[]): string {
  return stages.map((stage) => `${stage.node_id}:${stage.start_layer}-${stage.end_layer}`).join('>');
}

/** The routes that calls in flight run over, the busiest first, each as a path through the rows. */
export function routesOf(frame: Frame, rows: readonly MeshNode[], calls: Iterable<Call>, model: string): RouteLine[] {
  const groups = new Map<string, { stages: Stage[]; calls: number }>();
  for (const call of calls) {
    if (call.model !== model || ENDED.has(call.phase) || call.stages.length === 0) continue;
    const key = routeKey(call.stages);
    const group = groups.get(key);
    if (group === undefined) groups.set(key, { stages: call.stages, calls: 1 });
    else group.calls += 1;
  }
  const rowOf = new Map(rows.map((node, index) => [node.node_id, index]));
  return [...groups.entries()]
    .filter(([, group]) => group.stages.every((stage) => rowOf.has(stage.node_id)))
    .sort(([a, one], [b, other]) => other.calls - one.calls || (a < b ? -1 : 1))
    .map(([key, { stages, calls }], index) => ({
      key,
      stages,
      calls,
      path: pathOf(frame, stages, (stage) => rowOf.get(stage.node_id) ?? 0, lane(index)),
    }));
}

/** Lines lie side by side in the lower half of the bars. */
function lane(index: number): number {
  return BAR / 2 + 3 + (index % 3) * 4;
}

function pathOf(frame: Frame, stages: readonly Stage[], rowOf: (stage: Stage) => number, offset: number): string {
  let path = '';
  let fromY = 0;
  stages.forEach((stage, index) => {
    const y = barTop(frame, rowOf(stage)) + offset;
    const left = xOf(frame, stage.start_layer);
    const right = xOf(frame, stage.end_layer + 1);
    const inset = Math.min(7, (right - left) / 4);
    if (index === 0) path = `M${round(left + 4)} ${round(y)}`;
    else path += `C${round(left + inset)} ${round(fromY)} ${round(left - inset)} ${round(y)} ${round(left + inset)} ${round(y)}`;
    const end = index === stages.length - 1 ? right - 4 : right - inset;
    path += `L${round(end)} ${round(y)}`;
    fromY = y;
  });
  return path;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}

/** Layers to write a number over, so that numbers stay about 40 pixels apart. */
export function ticks(frame: Frame): number[] {
  const wanted = Math.max(1, (frame.width - frame.labelWidth) / 42);
  const step = [1, 2, 5, 10, 20, 50, 100].find((size) => frame.layers / size <= wanted) ?? 200;
  const marks: number[] = [];
  for (let layer = 0; layer < frame.layers; layer += step) marks.push(layer);
  return marks;
}

/** What the picture says, in words. */
export function inWords(model: Model, rows: readonly MeshNode[]): string {
  const held = rows
    .map((node) => {
      const ranges = node.shards
        .filter((shard) => shard.model === model.id)
        .map((shard) => `${shard.start_layer} to ${shard.end_layer}`);
      return `${node.name} (${node.state}) holds layers ${ranges.join(' and ')}`;
    })
    .join('; ');
  const gaps = model.gaps.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(', ');
  return `${model.id}, ${model.layers} layers. ${held || 'No node is shown'}. ${
    gaps === '' ? 'No layer is missing.' : `Missing layers: ${gaps}.`
  }`;
}
