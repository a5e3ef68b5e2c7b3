import { TABS, type Tab } from './router.svelte';

export const titles: Record<Tab, string> = {
  mesh: 'Mesh',
  chat: 'Chat',
  calls: 'Calls',
  console: 'Console',
  routing: 'Routing',
  accounts: 'Accounts',
};

const ADMIN_ONLY: ReadonlySet<Tab> = new Set<Tab>(['routing']);

/** Tabs with something to show for a key; the server decides what data it sends, this is only the menu. */
export function visibleTabs(admin: boolean): Tab[] {
  return TABS.filter((tab) => admin || !ADMIN_ONLY.has(tab));
}
