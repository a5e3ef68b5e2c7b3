// One colour per node, the same on every tab, in the order in which this page met the nodes.

import { live } from '../api/live.svelte';

const HUES = 8;
const order = new Map<string, number>();

/** A CSS variable's name for the node: its place among the first eight, then one shared grey. */
export function nodeColour(nodeId: string): string {
  let index = order.get(nodeId);
  if (index === undefined) {
    index = order.size;
    order.set(nodeId, index);
  }
  return index < HUES ? `var(--node-${index})` : 'var(--node-other)';
}

export function nodeName(nodeId: string, fallback?: string): string {
  return live.nodes.get(nodeId)?.name ?? fallback ?? nodeId;
}
