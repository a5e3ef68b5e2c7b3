// The conversations of this browser and what one can do with them.

import { SvelteMap } from 'svelte/reactivity';
import { live } from '../api/live.svelte';
import { addressOf, router } from '../shell/router.svelte';
import { Run } from './run.svelte';
import { ChatStore } from './store';
import { lastLeaf, pathTo, requestBody, siblings, subtree, titleFrom } from './tree';
import { DEFAULT_PARAMS, type Conversation, type Message, type Params } from './types';

export class Chats {
  list = $state.raw<Conversation[]>([]);
  /** Messages of the open conversation, all branches; replaced at boundaries only. */
  messages = $state.raw<Message[]>([]);
  openId = $state<string | null>(null);
  loaded = $state(false);
  /** Why nothing is kept, when the browser's database is not to be had. */
  storeError = $state('');
  /** Answers being written, by message id. */
  runs = new SvelteMap<string, Run>();
  /** Settings of a conversation that does not exist yet. */
  draft = $state<Pick<Conversation, 'model' | 'system' | 'params'>>(blank());

  private readonly store = new ChatStore();
  private loading: Promise<void> | null = null;

  readonly current = $derived(this.list.find((item) => item.id === this.openId) ?? null);
  readonly settings = $derived(this.current ?? this.draft);
  readonly path = $derived(pathTo(this.messages, this.current?.leaf ?? null));
  readonly running = $derived(
    [...this.runs.values()].find((run) => run.message.conversation === this.openId) ?? null,
  );
  readonly models = $derived([...live.models.values()]);
  readonly model = $derived(
    this.settings.model !== null && live.models.has(this.settings.model)
      ? this.settings.model
      : ((this.models.find((model) => model.default) ?? this.models.find((model) => model.complete) ?? this.models[0])
          ?.id ?? null),
  );

  load(): Promise<void> {
    this.loading ??= this.keep(async () => {
      await this.store.stripStreaming();
      this.list = await this.store.conversations();
    }).then(() => {
      this.loaded = true;
    });
    return this.loading;
  }

  async open(id: string | null): Promise<void> {
    await this.load();
    if (id === this.openId) return;
    this.openId = id;
    this.messages = [];
    if (id === null) {
      this.draft = blank();
      return;
    }
    await this.keep(async () => {
      const stored = await this.store.messages(id);
      if (this.openId !== id) return;
      // An answer that is being written here is newer than what the database has.
      this.messages = stored.map((message) => this.runs.get(message.id)?.message ?? message);
    });
  }

  async send(text: string): Promise<void> {
    // What is stored comes first: it would replace a conversation that began before it.
    await this.load();
    if (this.running !== null || text.trim() === '') return;
    let conversation = this.current;
    if (conversation === null) {
      const now = Date.now();
      const { model, system, params } = $state.snapshot(this.draft);
      conversation = { id: newId(), title: titleFrom(text), created: now, updated: now, model, system, params, leaf: null };
      this.list = [conversation, ...this.list];
      this.messages = [];
      this.openId = conversation.id;
      router.go(addressOf('chat', conversation.id), { replace: true });
    }
    await this.ask(conversation, conversation.leaf, text);
  }

  /** A new version of a question, beside the old one, with an answer of its own. */
  async edit(message: Message, text: string): Promise<void> {
    if (this.current === null || this.running !== null || text.trim() === '') return;
    await this.ask(this.current, message.parent, text);
  }

  /** Another answer to the same question. One that failed before its first word makes room for it. */
  async regenerate(message: Message): Promise<void> {
    if (this.current === null || this.running !== null || message.parent === null) return;
    if (message.content === '') {
      this.messages = this.messages.filter((other) => other.id !== message.id);
      await this.keep(() => this.store.deleteMessages([message.id]));
    }
    await this.answer(this.current, message.parent);
  }

  async show(message: Message, step: 1 | -1): Promise<void> {
    const versions = siblings(this.messages, message);
    const at = versions.findIndex((other) => other.id === message.id);
    const next = versions[at + step];
    if (next === undefined || this.current === null) return;
    await this.change(this.current.id, { leaf: lastLeaf(this.messages, next.id) }, false);
  }

  async deleteMessage(message: Message): Promise<void> {
    if (this.current === null || this.running !== null) return;
    const gone = subtree(this.messages, message.id);
    const other = siblings(this.messages, message).filter((sibling) => sibling.id !== message.id).at(-1);
    this.messages = this.messages.filter((item) => !gone.has(item.id));
    const leaf = other === undefined ? message.parent : lastLeaf(this.messages, other.id);
    await this.change(this.current.id, { leaf }, false);
    await this.keep(() => this.store.deleteMessages(gone));
  }

  stop(): void {
    this.running?.stop();
  }

  async rename(id: string, title: string): Promise<void> {
    if (title.trim() !== '') await this.change(id, { title: title.trim() }, false);
  }

  async configure(change: { model?: string | null; system?: string; params?: Partial<Params> }): Promise<void> {
    const params = { ...$state.snapshot(this.settings.params), ...change.params };
    if (this.current === null) this.draft = { ...this.draft, ...change, params };
    else await this.change(this.current.id, { ...change, params }, false);
  }

  async remove(id: string): Promise<void> {
    for (const run of this.runs.values()) if (run.message.conversation === id) run.stop();
    this.list = this.list.filter((item) => item.id !== id);
    if (this.openId === id) {
      this.openId = null;
      this.messages = [];
      router.go(addressOf('chat'), { replace: true });
    }
    await this.keep(() => this.store.deleteConversation(id));
  }

  async search(text: string): Promise<Set<string>> {
    return (await this.keep(() => this.store.search(text))) ?? new Set();
  }

  async messagesOf(id: string): Promise<Message[]> {
    if (id === this.openId) return this.messages;
    return (await this.keep(() => this.store.messages(id))) ?? [];
  }

  private async ask(conversation: Conversation, parent: string | null, text: string): Promise<void> {
    const question: Message = {
      id: newId(),
      conversation: conversation.id,
      parent,
      role: 'user',
      content: text.trim(),
      created: Date.now(),
    };
    this.messages = [...this.messages, question];
    void this.keep(() => this.store.saveMessages(question));
    void this.change(conversation.id, { leaf: question.id }, true);
    await this.answer(conversation, question.id);
  }

  private async answer(conversation: Conversation, question: string): Promise<void> {
    const model = this.model ?? '';
    const message: Message = {
      id: newId(),
      conversation: conversation.id,
      parent: question,
      role: 'assistant',
      content: '',
      created: Date.now(),
      model,
      streaming: true,
    };
    const path = pathTo(this.messages, question);
    const run = new Run(message, (growing) => void this.keep(() => this.store.saveMessages(growing)));
    this.runs.set(message.id, run);
    // The question is on the page before the answer's bubble is made: one piece of work less at a time.
    await new Promise((resolve) => setTimeout(resolve));
    this.messages = [...this.messages, message];
    void this.keep(() => this.store.saveMessages(message));
    void this.change(conversation.id, { leaf: message.id }, true);
    const ended = await run.go(requestBody(conversation, model, path));
    this.runs.delete(message.id);
    if (!this.list.some((item) => item.id === conversation.id)) return;
    if (this.openId === conversation.id) {
      this.messages = this.messages.map((other) => (other.id === ended.id ? ended : other));
    }
    await this.keep(() => this.store.saveMessages(ended));
  }

  private async change(id: string, change: Partial<Conversation>, touch: boolean): Promise<void> {
    const before = this.list.find((item) => item.id === id);
    if (before === undefined) return;
    const after: Conversation = { ...before, ...change, ...(touch ? { updated: Date.now() } : {}) };
    this.list = touch
      ? [after, ...this.list.filter((item) => item.id !== id)]
      : this.list.map((item) => (item.id === id ? after : item));
    await this.keep(() => this.store.saveConversation($state.snapshot(after) as Conversation));
  }

  /** Runs what needs the database; without one the page works on, and says that nothing is kept. */
  private async keep<T>(work: () => Promise<T>): Promise<T | undefined> {
    try {
      return await work();
    } catch (cause) {
      this.storeError = `This browser keeps no conversations: ${cause instanceof Error ? cause.message : String(cause)}`;
      return undefined;
    }
  }
}

function blank(): Pick<Conversation, 'model' | 'system' | 'params'> {
  return { model: null, system: '', params: { ...DEFAULT_PARAMS } };
}

/** crypto.randomUUID exists on secure origins only; a mesh at home is often plain http. */
function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

export const chats = new Chats();
