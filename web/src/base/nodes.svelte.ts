// One colour per node, the same on every tab: by the order of the nodes' names when the page first met them.

import { untrack } from 'svelte';
import { live } from '../api/live.svelte';

const HUES = 8;
const order = new Map<string, number>();

/** A CSS variable's name for the node: its place among the first eight, then one shared grey. */
export function nodeColour(nodeId: string): string {
  if (!order.has(nodeId)) {
    // All known nodes take their places first, so that the order does not depend on which tab is open.
    const known = untrack(() => [...live.nodes.values()]);
    known.sort((a, b) => (a.name === b.name ? 0 : a.name < b.name ? -1 : 1));
    for (const id of [...known.map((node) => node.node_id), nodeId]) if (!order.has(id)) order.set(id, order.size);
  }
  const index = order.get(nodeId) ?? HUES;
  return index < HUES ? `var(--node-${index})` : 'var(--node-other)';
}

export function nodeName(nodeId: string, fallback?: string): string {
  return live.nodes.get(nodeId)?.name ?? fallback ?? nodeId;
}

/** Node ids in the tracker's sentences, written as the names that the rest of the page uses. */
export function withNames(text: string, nodes: Iterable<{ node_id: string; name: string }>): string {
  let result = text;
  for (const { node_id, name } of nodes) if (node_id !== name) result = result.replaceAll(node_id, name);
  return result;
}
